"""A tiny engine for tests of what wraps engines: says what it is told to, fails where it is told to.

Law: keeps to the Engine contract (tests/contract/engine_suite.py) as far as it goes; no time passes unless
told.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from services.engine import EngineFacts, EngineStats, FinishReason, GenerateRequest, Token


@dataclass(slots=True)
class Script:
    """An Engine. error: raised after `after` tokens; then it works again unless `always`. wait_s: before its
    first token; token_s: before each. broken: verbs ("start", "sleep", "wake") that raise RuntimeError.
    size_error: raised by `size`. seen: the requests it got. done: the verbs it did."""

    name: str
    model: str = "m"
    error: Exception | None = None
    after: int = 0
    always: bool = False
    wait_s: float = 0.0
    token_s: float = 0.0
    context: int = 0
    sequences: int = 0
    sleep_levels: tuple[int, ...] = (1,)
    fragmentation: float = 0.0
    extra_running: int = 0
    dead: str = ""
    broken: tuple[str, ...] = ()
    size_error: Exception | None = None
    seen: list[GenerateRequest] = field(default_factory=list)
    done: list[str] = field(default_factory=list)
    running: int = 0
    closed_early: int = 0

    async def start(self) -> None:
        self._do("start")

    async def sleep(self, level: int = 1) -> None:
        self._do("sleep", f" {level}")

    async def wake(self) -> None:
        self._do("wake")

    async def close(self) -> None:
        self._do("close")

    def _do(self, verb: str, more: str = "") -> None:
        if verb in self.broken:
            raise RuntimeError(f"{self.name} can't {verb}")
        self.done.append(verb + more)

    def facts(self) -> EngineFacts:
        return EngineFacts(
            self.name,
            self.model,
            context=self.context,
            sequences=self.sequences,
            sleep_levels=self.sleep_levels,
            weights_bytes=100,
        )

    def size(self, request: GenerateRequest) -> int:
        if self.size_error is not None:
            raise self.size_error
        return len(request.prompt_ids) or len(request.prompt)

    def stats(self) -> EngineStats:
        running = self.running + self.extra_running
        return EngineStats(
            running,
            0,
            fragmentation=self.fragmentation,
            dead=self.dead,
            memory_bytes=1000,
            extra={"steps": 1.0},
        )

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Token, None]:
        self.seen.append(request)
        self.running += 1
        ended = False
        try:
            if self.wait_s:
                await asyncio.sleep(self.wait_s)
            for index in range(request.max_tokens):
                if self.error is not None and index == self.after:
                    ended, error = True, self.error
                    if not self.always:
                        self.error = None
                    raise error
                if self.token_s:
                    await asyncio.sleep(self.token_s)
                last = index + 1 == request.max_tokens
                yield Token(index, "x", FinishReason.LENGTH if last else None, len(request.prompt), self.name)
            ended = True
        finally:
            self.running -= 1
            self.closed_early += not ended
