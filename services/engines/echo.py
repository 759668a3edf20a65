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
from services.engine import EngineFacts, EngineStats, FinishReason, GenerateRequest, Token
from services.faults import EngineDied

_WORDS = (
    "water river weir stream flow gate basin canal delta spring source mouth bank reed stone bridge "
    "mill lock tide pool ford brook dam sluice eddy rapid marsh pond lake sea rain"
)
VOCABULARY = tuple(_WORDS.split())
PROMPT_CHARS_PER_TOKEN = 4
"""How the length of a prompt is counted: this engine has no tokenizer."""


FREE_TOKENS_PER_TURN = 64


@dataclass(frozen=True, slots=True)
class EchoOptions:
    """Costs in milliseconds. slots: sequences at once (0: no limit). kv_tokens: size of the imagined cache.

    fail_rate: share of requests that fail at once, 0..1; which ones follows from fault_seed and the number of
    the request alone. hang_after, die_after: index of the token at which a sequence stops for ever, or the
    engine breaks for good (-1: never).
    """

    token_cost_ms: float = 0.0
    prefill_ms_per_1000: float = 0.0
    slots: int = 0
    kv_tokens: int = 100_000
    fail_rate: float = 0.0
    fault_seed: int = 0
    hang_after: int = -1
    die_after: int = -1


_LIMITS: Mapping[str, tuple[float, float]] = {
    "token_cost_ms": (0, 1e6),
    "prefill_ms_per_1000": (0, 1e6),
    "slots": (0, 1e6),
    "kv_tokens": (1, 1e12),
    "fail_rate": (0, 1),
    "fault_seed": (0, 2**63),
    "hang_after": (-1, 1e9),
    "die_after": (-1, 1e9),
}


def parse(options: Mapping[str, str]) -> EchoOptions:
    """Options from text. Raises UsageError naming the option."""
    kinds = {f.name: f.type for f in fields(EchoOptions)}
    values: dict[str, float | int] = {}
    for name, text in options.items():
        if name not in kinds:
            known = ", ".join(sorted(kinds))
            raise UsageError(f"engine option {name!r}", "unknown to echo", f"known: {known}")
        try:
            values[name] = int(text) if kinds[name] == "int" else float(text)
        except ValueError:
            raise UsageError(f"engine option {name}={text!r}", f"not a number ({kinds[name]})") from None
        low, high = _LIMITS[name]
        if not low <= values[name] <= high:
            raise UsageError(f"engine option {name}={text!r}", "out of range", f"from {low:g} to {high:g}")
    return EchoOptions(**values)  # type: ignore[arg-type]


def make(model: str, options: Mapping[str, str]) -> EchoEngine:
    """It has no model: any name will do."""
    return EchoEngine(parse(options), model)


class Source:
    """The endless token sequence of one (prompt, seed). The prompt is hashed once, not once a token."""

    def __init__(self, prompt: str, seed: int) -> None:
        self._base = hashlib.blake2b(f"{seed}\0{prompt}".encode(errors="surrogatepass"), digest_size=4)

    def at(self, index: int) -> tuple[int, str]:
        """Token id and text of one step."""
        state = self._base.copy()
        state.update(b"\0%d" % index)
        number = int.from_bytes(state.digest(), "big") % len(VOCABULARY)
        return number, (" " if index else "") + VOCABULARY[number]


def prompt_tokens(prompt: str) -> int:
    return max(1, -(-len(prompt) // PROMPT_CHARS_PER_TOKEN))


def fails(fault_seed: int, number: int, rate: float) -> bool:
    """Whether request `number` is one of the share `rate` that fails."""
    digest = hashlib.blake2b(b"%d\0%d" % (fault_seed, number), digest_size=8).digest()
    return int.from_bytes(digest, "big") < rate * 2**64


class EchoEngine:
    """An Engine. Cancelling is closing the iterator; its slot is free at once."""

    def __init__(self, options: EchoOptions, model: str = "") -> None:
        self._options, self._model = options, model
        self._slots = asyncio.Semaphore(options.slots) if options.slots else None
        self._started = self._asleep = self._dead = False
        self._running = self._waiting = self._tokens = self._kv = self._requests = 0

    async def start(self) -> None:
        if self._started:
            raise RuntimeError("the engine runs already")
        self._started = True

    def facts(self) -> EngineFacts:
        o = self._options
        return EngineFacts("echo", self._model, sequences=o.slots, kv_tokens=o.kv_tokens)

    def size(self, request: GenerateRequest) -> int:
        return len(request.prompt_ids) or prompt_tokens(request.prompt)

    async def close(self) -> None:
        """It holds nothing."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Token, None]:
        """Tokens of one sequence. Raises EngineDied by a fault on order, RuntimeError while asleep."""
        self._check()
        self._requests += 1
        if fails(self._options.fault_seed, self._requests, self._options.fail_rate):
            raise EngineDied(f"request {self._requests} fails on order")
        await self._enter()
        asked = size = self.size(request)
        self._kv += size
        try:
            await self._cost(self._options.prefill_ms_per_1000 * size / 1000)
            source, tail = Source(request.prompt, request.seed), ""
            keep = max(map(len, request.stop), default=0)
            for index in range(request.max_tokens):
                await self._fault(index)
                await self._step(index)
                number, piece = source.at(index)
                # A stop string may begin in an earlier token, never further back than its own length.
                tail = tail[-keep:] + piece if keep else ""
                self._tokens += 1
                self._kv += 1
                size += 1
                stopped = any(stop in tail for stop in request.stop)
                last = index + 1 == request.max_tokens
                finish = FinishReason.STOP if stopped else FinishReason.LENGTH if last else None
                yield Token(number, piece, finish, asked, "echo")
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
        dead = "the engine is dead" if self._dead else ""
        return EngineStats(self._running, self._waiting, used, self._tokens, dead=dead)

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
        if self._dead:
            raise EngineDied("the engine is dead")
        if index == self._options.die_after:
            self._dead = True
            raise EngineDied(f"the engine died at token {index} on order")

    async def _step(self, index: int) -> None:
        """The price of one token. Free tokens still let others have a turn now and then."""
        if self._options.token_cost_ms:
            await self._cost(self._options.token_cost_ms)
        elif index % FREE_TOKENS_PER_TURN == FREE_TOKENS_PER_TURN - 1:
            await asyncio.sleep(0)

    @staticmethod
    async def _cost(ms: float) -> None:
        if ms > 0:
            await asyncio.sleep(ms / 1000)
