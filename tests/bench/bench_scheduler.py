"""The batch scheduler: what it can do by itself, what it costs a lone request, what a full engine makes.

Law: figures, no asserts. Peers are measured in the same run, in turns: a bare asyncio batcher, the timer of
the event loop, the engine without a scheduler, and static batching, all written here. About half a minute.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from mesh.clock import SystemClock
from services.batching import BatchingSettings, Scheduled
from services.batching.admission import limits
from services.batching.core import Core
from services.batching.model import Ticket
from services.engine import Engine, EngineFacts, FinishReason, GenerateRequest, Token
from services.engines.sim import SimEngine
from services.sim_cost import SimOptions, limit_tokens_s
from tests.bench.bench_overhead import quantile

NAME = "scheduler"
CLOCK = SystemClock()
REQUESTS, CLIENTS, ROUNDS = 60_000, 512, 3
PROBES, DELAY_S = 250, 0.010
LONE = 60
SLOTS, CROWD = 64, 768
LENGTHS, WEIGHTS = (8, 16, 32, 64, 128), (30, 25, 20, 15, 10)
FULL = SimOptions(step_ms=4.0, seq_ms=0.02, prefill_ms_per_token=0.005, slots=SLOTS, kv_tokens=10**7)


def run() -> Iterator[dict[str, Any]]:
    core, static = max(_core(True) for _ in range(ROUNDS)), max(_core(False) for _ in range(ROUNDS))
    bare = max(asyncio.run(_bare()) for _ in range(ROUNDS))
    shell = max(asyncio.run(_shell()) for _ in range(ROUNDS))
    peer = "a bare asyncio batcher: one future a request, no order, no limits"
    yield _row("core alone, static engine", static, "requests/s", peer, bare, ">= 100000 requests/s")
    yield _row("core alone, continuous engine", core, "requests/s", peer, bare, ">= 100000 requests/s")
    yield _row(f"Scheduled, an engine that costs nothing, {CLIENTS} clients", shell, "requests/s", peer, bare)
    yield from asyncio.run(_lateness())
    yield from asyncio.run(_lone())
    yield from asyncio.run(_saturation())


def _row(
    metric: str, value: float, unit: str, peer: str = "", peer_value: float | None = None, goal: str = ""
) -> dict[str, Any]:
    return {
        "bench": NAME,
        "metric": metric,
        "value": value,
        "unit": unit,
        "peer": peer,
        "peer_value": peer_value,
        "goal": goal,
    }


# -- alone


def _core(continuous: bool) -> float:
    """Requests a second through submit, batch, complete; three classes, deadlines, KV accounting."""
    how = BatchingSettings(queue_limit=CLIENTS)
    core: Core[Ticket] = Core(how, limits(EngineFacts("x", kv_tokens=10**9, continuous=continuous), how))
    start, done, now = CLOCK.monotonic(), 0, 0.0
    while done < REQUESTS:
        now += 0.001
        for number in range(CLIENTS):
            core.submit(Ticket(4, number % 3, now, now + 30), now)
        while batch := core.start(now):
            for ticket in batch:
                core.finish(ticket, now)
            done += len(batch)
    return done / (CLOCK.monotonic() - start)


class _Bare:
    """The least that can be called a batcher: 128 or a timer, then all futures of the batch are done."""

    def __init__(self) -> None:
        self._batch: list[asyncio.Future[None]] = []
        self._timer: asyncio.TimerHandle | None = None

    def submit(self) -> asyncio.Future[None]:
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        self._batch.append(future)
        if len(self._batch) >= 128:
            self._flush()
        elif self._timer is None:
            self._timer = loop.call_later(0.05, self._flush)
        return future

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        batch, self._batch = self._batch, []
        for future in batch:
            future.set_result(None)


class _Free:
    """An engine whose tokens cost nothing; one a request."""

    def __init__(self, facts: EngineFacts) -> None:
        self._facts = facts
        self.begun: list[float] = []

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def facts(self) -> EngineFacts:
        return self._facts

    def size(self, request: GenerateRequest) -> int:
        return 8

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Token, None]:
        self.begun.append(CLOCK.monotonic())
        if request.max_tokens > 1:
            await asyncio.Event().wait()
        yield Token(1, "a", FinishReason.LENGTH)


async def _clients(ask: Callable[[], Awaitable[None]], requests: int) -> float:
    """Requests a second of CLIENTS clients, each with one request at a time."""

    async def client() -> None:
        for _ in range(requests // CLIENTS):
            await ask()

    start = CLOCK.monotonic()
    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return requests // CLIENTS * CLIENTS / (CLOCK.monotonic() - start)


async def _bare() -> float:
    bare = _Bare()

    async def ask() -> None:
        await bare.submit()

    return await _clients(ask, REQUESTS)


async def _shell() -> float:
    engine = Scheduled(_Free(EngineFacts("x")))  # type: ignore[arg-type]
    await engine.start()
    request = GenerateRequest("r", "prompt", 1, tenant_class="gold")

    async def ask() -> None:
        async for _ in engine.generate(request):
            pass

    rate = await _clients(ask, REQUESTS // 4)
    await engine.close()
    return rate


# -- on time


async def _lateness() -> list[dict[str, Any]]:
    """How late a batch leaves whose time has come, beside a plain timer of the same loop."""
    inner = _Free(EngineFacts("x", continuous=False))
    engine = Scheduled(inner, BatchingSettings(max_delay_ms=DELAY_S * 1000))  # type: ignore[arg-type]
    await engine.start()
    # Something must run, or the probe would go at once.
    busy = asyncio.ensure_future(_read(engine, GenerateRequest("busy", "p", 2)))
    await asyncio.sleep(0.01)
    ours, plain = [], []
    for _ in range(PROBES):
        start = CLOCK.monotonic()
        await _read(engine, GenerateRequest("r", "p", 1))
        ours.append((inner.begun[-1] - start - DELAY_S) * 1000)
        start = CLOCK.monotonic()
        await asyncio.sleep(DELAY_S)
        plain.append((CLOCK.monotonic() - start - DELAY_S) * 1000)
    busy.cancel()
    await asyncio.wait((busy,))
    await engine.close()
    late, bare = quantile(sorted(ours), 0.99), quantile(sorted(plain), 0.99)
    return [_row("timer lateness p99", late, "ms", "asyncio.sleep in the same loop", bare, "<= 2 ms")]


async def _read(engine: Engine, request: GenerateRequest) -> None:
    async with contextlib.aclosing(engine.generate(request)) as tokens:
        async for _ in tokens:
            pass


# -- alone in an idle engine


async def _lone() -> list[dict[str, Any]]:
    rows = []
    for continuous in (1, 0):
        options = SimOptions(step_ms=2.0, continuous=continuous)
        direct, inner = SimEngine(options), SimEngine(options)
        scheduled = Scheduled(inner, BatchingSettings(max_delay_ms=50))
        await direct.start()
        await scheduled.start()
        spent: dict[int, list[float]] = {0: [], 1: []}
        dice = Random(7)
        for number in range(LONE):
            for which in (0, 1) if number % 2 else (1, 0):
                # In step with timers of whole milliseconds a request takes 1 ms more, or less, than another.
                await asyncio.sleep(dice.random() * 0.003)
                spent[which].append(await _once((direct, scheduled)[which]))
        p50 = [quantile(sorted(spent[which]), 0.5) * 1000 for which in (0, 1)]
        kind = "continuous" if continuous else "static"
        rows.append(
            _row(
                f"lone request, {kind} engine, delay 50 ms: added p50",
                p50[1] - p50[0],
                "ms",
                "the same engine without the scheduler: p50",
                p50[0],
                "<= 2 ms",
            )
        )
        await scheduled.close()
        await direct.close()
    return rows


async def _once(engine: Engine) -> float:
    start = CLOCK.monotonic()
    await _read(engine, GenerateRequest("r", "over the weir", 1))
    return CLOCK.monotonic() - start


# -- full


@dataclass(slots=True)
class Crowd:
    """All at once at one door. rate: tokens/s until the last of them got its first token."""

    started: float = 0.0
    tokens: int = 0
    waits: list[float] = field(default_factory=list)
    rate: float = 0.0

    def token(self, first: bool) -> None:
        self.tokens += 1
        if first:
            spent = CLOCK.monotonic() - self.started
            self.waits.append(spent)
            if len(self.waits) == CROWD:
                self.rate = self.tokens / spent

    @property
    def p99_s(self) -> float:
        return quantile(sorted(self.waits), 0.99)


def _asks() -> list[GenerateRequest]:
    dice = Random(3)
    lengths = dice.choices(LENGTHS, WEIGHTS, k=CROWD)
    return [GenerateRequest(f"r{n}", "w" * dice.randrange(40, 800), size) for n, size in enumerate(lengths)]


async def _one(engine: Engine, ask: GenerateRequest, crowd: Crowd) -> None:
    first = True
    async with contextlib.aclosing(engine.generate(ask)) as tokens:
        async for _ in tokens:
            crowd.token(first)
            first = False


async def _all_at_once(engine: Engine) -> Crowd:
    await engine.start()
    crowd = Crowd(CLOCK.monotonic())
    await asyncio.gather(*(_one(engine, ask, crowd) for ask in _asks()))
    await engine.close()
    return crowd


async def _static(engine: Engine) -> Crowd:
    """Static batching: a full batch goes in, and the next one when all of it is done."""
    await engine.start()
    crowd, asks = Crowd(CLOCK.monotonic()), _asks()
    for begin in range(0, len(asks), SLOTS):
        await asyncio.gather(*(_one(engine, ask, crowd) for ask in asks[begin : begin + SLOTS]))
    await engine.close()
    return crowd


async def _saturation() -> list[dict[str, Any]]:
    how = BatchingSettings(queue_limit=CROWD)
    direct = [await _all_at_once(SimEngine(FULL))]
    ours = [await _all_at_once(Scheduled(SimEngine(FULL), how))]
    static = await _static(SimEngine(FULL))
    ours.append(await _all_at_once(Scheduled(SimEngine(FULL), how)))
    direct.append(await _all_at_once(SimEngine(FULL)))
    rate, limit = _mean([c.rate for c in ours]), _mean([c.rate for c in direct])
    wait = _mean([c.p99_s for c in ours])
    name = f"saturation, sim engine, {CROWD} mixed lengths"
    own, peer = "the engine's own queue", f"static batches of {SLOTS}"
    listed = "the price list with all places full and no prompts"
    return [
        _row(f"{name}: tokens/s", rate, "tokens/s", own, limit, "ratio >= 0.95"),
        _row(f"{name}: tokens/s", rate, "tokens/s", peer, static.rate, "ratio >= 2"),
        _row(f"{name}: tokens/s", rate, "tokens/s", listed, limit_tokens_s(FULL)),
        _row(f"{name}: p99 wait for the first token", wait, "s", peer, static.p99_s, "ratio <= 1"),
    ]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
