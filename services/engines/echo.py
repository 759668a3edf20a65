"""The echo engine: deterministic tokens at a configurable price, with faults on order.

Law: tokens are a pure function of (prompt, seed, index); time passes only through asyncio.sleep; no model, no
randomness. It stands in where the mesh is what is tested, not the model.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, fields

from regions.cli.errors import UsageError
from services.engine import EngineStats, FinishReason, GenerateRequest, Token

_WORDS = (
    "water river weir stream flow gate basin canal delta spring source mouth bank reed stone bridge "
    "mill lock tide pool ford brook dam sluice eddy rapid marsh pond lake sea rain"
)
VOCABULARY = tuple(_WORDS.split())
PROMPT_CHARS_PER_TOKEN = 4
"""How the length of a prompt is counted: this engine has no tokenizer."""


class EngineDied(RuntimeError):
    """The engine failed in the middle of a sequence."""


@dataclass(frozen=True, slots=True)
class EchoOptions:
    """Costs in milliseconds. slots: sequences at once (0: no limit). kv_tokens: size of the imagined cache.

    fail_every: each n-th request fails at once (0: never). hang_after, die_after: index of the token at which
    a sequence stops for ever, or the engine breaks (-1: never).
    """

    token_cost_ms: float = 0.0
    prefill_ms_per_1000: float = 0.0
    slots: int = 0
    kv_tokens: int = 100_000
    fail_every: int = 0
    hang_after: int = -1
    die_after: int = -1


def parse(options: Mapping[str, str]) -> EchoOptions:
    """Options from text. Raises UsageError naming the option."""
    kinds = {f.name: f.type for f in fields(EchoOptions)}
    values: dict[str, float | int] = {}
    for name, text in options.items():
        if name not in kinds:
            raise UsageError(
                f"engine option {name!r}", "unknown to echo", f"known: {', '.join(sorted(kinds))}"
            )
        try:
            values[name] = int(text) if kinds[name] == "int" else float(text)
        except ValueError:
            raise UsageError(f"engine option {name}={text!r}", f"not a {kinds[name]}") from None
        if values[name] != values[name] or values[name] < -1:
            raise UsageError(f"engine option {name}={text!r}", "out of range")
    return EchoOptions(**values)  # type: ignore[arg-type]


def make(options: Mapping[str, str]) -> EchoEngine:
    return EchoEngine(parse(options))


def token_at(prompt: str, seed: int, index: int) -> tuple[int, str]:
    """Token id and text of one step."""
    digest = hashlib.blake2b(f"{seed}\0{index}\0{prompt}".encode(errors="surrogatepass"), digest_size=4)
    number = int.from_bytes(digest.digest(), "big") % len(VOCABULARY)
    return number, (" " if index else "") + VOCABULARY[number]


def prompt_tokens(prompt: str) -> int:
    return max(1, -(-len(prompt) // PROMPT_CHARS_PER_TOKEN))


class EchoEngine:
    """An Engine. Cancelling is closing the iterator; its slot is free at once."""

    def __init__(self, options: EchoOptions) -> None:
        self._options = options
        self._slots = asyncio.Semaphore(options.slots) if options.slots else None
        self._started = self._asleep = self._dead = False
        self._running = self._waiting = self._tokens = self._kv = self._requests = 0

    async def start(self) -> None:
        if self._started:
            raise RuntimeError("the engine runs already")
        self._started = True

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Token, None]:
        """Tokens of one sequence. Raises EngineDied by a fault on order, RuntimeError while asleep."""
        self._check()
        self._requests += 1
        if self._options.fail_every and self._requests % self._options.fail_every == 0:
            raise EngineDied(f"request {self._requests} fails on order")
        await self._enter()
        size = prompt_tokens(request.prompt)
        self._kv += size
        try:
            await self._cost(self._options.prefill_ms_per_1000 * size / 1000)
            text = ""
            for index in range(request.max_tokens):
                await self._fault(index)
                await self._cost(self._options.token_cost_ms)
                number, piece = token_at(request.prompt, request.seed, index)
                text += piece
                self._tokens += 1
                self._kv += 1
                size += 1
                stopped = any(stop in text for stop in request.stop)
                last = index + 1 == request.max_tokens
                finish = FinishReason.STOP if stopped else FinishReason.LENGTH if last else None
                yield Token(number, piece, finish)
                if finish is not None:
                    return
        finally:
            self._kv -= size
            self._leave()

    async def sleep(self, level: int = 1) -> None:
        if self._running or self._waiting:
            raise RuntimeError("can't sleep: sequences are running")
        self._asleep = True

    async def wake(self) -> None:
        self._asleep = False

    def stats(self) -> EngineStats:
        used = min(1.0, self._kv / self._options.kv_tokens)
        return EngineStats(self._running, self._waiting, used, self._tokens, {"dead": float(self._dead)})

    def _check(self) -> None:
        if self._dead:
            raise EngineDied("the engine is dead")
        if not self._started or self._asleep:
            raise RuntimeError("the engine sleeps" if self._asleep else "the engine was not started")

    async def _enter(self) -> None:
        self._waiting += 1
        try:
            if self._slots is not None:
                await self._slots.acquire()
        finally:
            self._waiting -= 1
        self._running += 1

    def _leave(self) -> None:
        self._running -= 1
        if self._slots is not None:
            self._slots.release()

    async def _fault(self, index: int) -> None:
        if index == self._options.hang_after:
            await asyncio.Event().wait()
        if index == self._options.die_after:
            self._dead = True
            raise EngineDied(f"the engine died at token {index} on order")

    @staticmethod
    async def _cost(ms: float) -> None:
        if ms > 0:
            await asyncio.sleep(ms / 1000)
