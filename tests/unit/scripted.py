"""An engine that does what a test wrote down: `Scripted(["a", "b", OutOfDeviceMemory("step 2")])`.

Law: no cleverness; every sequence plays the same script. `closed` counts iterators that were closed before
their end, `hangs` how often one came to a HANG.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace

from services.engine import EngineFacts, EngineStats, FinishReason, GenerateRequest, Token

HANG = "\0hang"
"""In a script: nothing comes any more."""
Step = str | Token | Exception


class Scripted:
    """An Engine. The last text ends its sequence with `finish`. reasons: request id → why a fallback
    answers."""

    def __init__(
        self,
        script: Sequence[Step] = (),
        *,
        facts: EngineFacts | None = None,
        stats: EngineStats | None = None,
        size: Callable[[GenerateRequest], int] = lambda request: (
            len(request.prompt_ids) or len(request.prompt)
        ),
        fallback: str = "",
    ) -> None:
        self._script, self._size, self._fallback = list(script), size, fallback
        self._facts = facts or EngineFacts("scripted", "echo-1")
        self.told = stats or EngineStats()
        self.seen: list[GenerateRequest] = []
        self.running = self.closed = self.hangs = 0
        self.dies = False

    async def start(self) -> None:
        """It runs."""

    def facts(self) -> EngineFacts:
        return self._facts

    def size(self, request: GenerateRequest) -> int:
        return self._size(request)

    def reason_of(self, request_id: str) -> str:
        return self._fallback

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Token, None]:
        self.seen.append(request)
        self.running += 1
        ended = False
        try:
            for i, step in enumerate(self._script):
                if step == HANG:
                    self.hangs += 1
                    await asyncio.Event().wait()
                if isinstance(step, Exception):
                    ended = True
                    if self.dies:
                        self.told = replace(self.told, dead=str(step))
                    raise step
                last = i + 1 == len(self._script)
                ended = last
                if isinstance(step, str):
                    finish = FinishReason.STOP if last else None
                    step = Token(i, step, finish, self._size(request) if not i else 0, "scripted")
                yield step
                await asyncio.sleep(0)
        finally:
            self.running -= 1
            self.closed += not ended

    async def sleep(self, level: int = 1) -> None:
        """It holds nothing."""

    async def wake(self) -> None:
        """It held nothing."""

    def stats(self) -> EngineStats:
        return replace(self.told, running=self.running + self.told.running)

    async def close(self) -> None:
        """It holds nothing."""
