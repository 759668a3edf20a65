"""What the fallback costs: to a request that the primary answers, and to one that has to switch engines.

Law: figures, no asserts. The peer is the engine alone, in turns by A B C C B A in the same run; tokens cost
nothing, so that only the way to them is measured.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import aclosing
from typing import Any

from mesh.clock import SystemClock
from services.engine import Engine, GenerateRequest
from services.engines.echo import EchoEngine, EchoOptions
from services.fallback.engine import FallbackEngine
from tests.bench.bench_overhead import quantile

NAME = "fallback"
REQUESTS, TURNS = 400, 3
ALONE, PRIMARY, SWITCH = "the engine alone", "the primary answers", "the primary fails, the secondary answers"
WAYS = (ALONE, PRIMARY, SWITCH, SWITCH, PRIMARY, ALONE)
CLAIM = "<= 8.2 ms"
"""S14: the fallback takes 8.2 and 14.7 ms."""


def run() -> Iterator[dict[str, Any]]:
    """A few seconds."""
    found, switched_ms = asyncio.run(measure())
    ms = {way: sorted(s * 1000 for s in seconds) for way, seconds in found.items()}
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        base = quantile(ms[ALONE], share)
        yield _row(f"first token, {PRIMARY}, {name}", quantile(ms[PRIMARY], share), base)
        yield _row(f"first token, {SWITCH}, {name}", quantile(ms[SWITCH], share), base, goal=CLAIM)
    yield _row("from the failure to the secondary being asked, mean", switched_ms, None, goal=CLAIM)


async def measure() -> tuple[dict[str, list[float]], float]:
    """Seconds to the first token by way, and mean milliseconds of the switch itself."""
    switching = FallbackEngine(EchoEngine(EchoOptions(fail_rate=1.0)), EchoEngine(EchoOptions()))
    engines: dict[str, Engine] = {
        ALONE: EchoEngine(EchoOptions()),
        PRIMARY: FallbackEngine(EchoEngine(EchoOptions()), EchoEngine(EchoOptions())),
        SWITCH: switching,
    }
    found: dict[str, list[float]] = {way: [] for way in engines}
    for engine in engines.values():
        await engine.start()
    for way in WAYS * TURNS:
        found[way] += [await _first(engines[way], number) for number in range(REQUESTS)]
    extra = switching.stats().extra
    label = '{reason="engine_error"}'
    spent = extra[f"weir_fallback_switch_seconds_total{label}"]
    return found, spent / extra[f"weir_fallback_requests_total{label}"] * 1000


async def _first(engine: Engine, number: int) -> float:
    clock = SystemClock()
    ask = GenerateRequest(f"r{number}", "a prompt of some length", 4)
    begin = clock.monotonic()
    async with aclosing(engine.generate(ask)) as tokens:
        await anext(tokens)
        return clock.monotonic() - begin


def _row(metric: str, value: float, peer_value: float | None, goal: str = "") -> dict[str, Any]:
    body = {"bench": NAME, "metric": metric, "value": value, "unit": "ms", "goal": goal}
    return body | ({"peer": ALONE, "peer_value": peer_value} if peer_value is not None else {})
