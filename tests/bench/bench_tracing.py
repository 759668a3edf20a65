"""What traces cost an executor: CPU and bytes per request, without, of all, and of errors and one per cent
(S21).

Law: figures, no asserts. Three executors of the same engine take the same requests in turns; CPU is each
process' own time, so that what else runs on the machine weighs little. One request in a hundred fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from tests.contract.executor_process import PORT, Executor, executor
from tests.fakes.otlp import Collector

NAME = "tracing"
OFF, ALL, SOME = "off", "all", "errors+1%"
IPS = {OFF: "127.107.9.11", ALL: "127.107.9.12", SOME: "127.107.9.13"}
WARM_UP, ROUNDS, REQUESTS, LINES, TOKENS = 300, 4, 1000, 16, 16
FAILING = 100
"""One in so many."""
PEER = "the same executor without tracing"


@dataclass
class Side:
    """One executor and what it used."""

    it: Executor
    collector: Collector
    cpu_s: float = 0.0


def run() -> list[dict[str, Any]]:
    """About half a minute."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        sides = {mode: _side(stack, folder, mode, ip) for mode, ip in IPS.items()}
        asyncio.run(_measure(sides))
    # Ended: their last spans have come.
    return _rows(sides)


def _side(stack: contextlib.ExitStack, folder: Path, mode: str, ip: str) -> Side:
    collector = stack.enter_context(Collector().up())
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "WEIR_TRACE_MODE": mode}
    off = {"OTEL_TRACES_EXPORTER": "none"}
    return Side(stack.enter_context(executor(folder, ip, env=off if mode == OFF else env)), collector)


async def _measure(sides: Mapping[str, Side]) -> None:
    for side in sides.values():
        await _requests(side.it.ip, WARM_UP)
    for turn in range(ROUNDS):
        order = list(sides.values())
        for side in order if turn % 2 else reversed(order):
            before = _cpu_s(side.it)
            await _requests(side.it.ip, REQUESTS)
            side.cpu_s += _cpu_s(side.it) - before
    for side in sides.values():
        side.it.process.terminate()
        await asyncio.to_thread(side.it.ended)


def _cpu_s(it: Executor) -> float:
    used = psutil.Process(it.process.pid).cpu_times()
    return float(used.user + used.system)


async def _requests(ip: str, count: int) -> None:
    numbers = iter(range(count))

    async def line(http: aiohttp.ClientSession) -> None:
        for number in numbers:
            body = {"prompt": "deep", "max_tokens": TOKENS, "seed": number}
            body |= {} if number % FAILING else {"max_tokens": 0}
            async with http.post(f"http://{ip}:{PORT}/v1/completions", data=json.dumps(body)) as answer:
                await answer.read()

    async with aiohttp.ClientSession() as http:
        await asyncio.gather(*(line(http) for _ in range(LINES)))


def _rows(sides: Mapping[str, Side]) -> list[dict[str, Any]]:
    rows, timed = [], ROUNDS * REQUESTS
    total = timed + WARM_UP
    off = 1e6 * sides[OFF].cpu_s / timed
    for mode in (ALL, SOME):
        side = sides[mode]
        sent = sum(len(json.dumps(body)) for body in side.collector.bodies)
        cpu = 1e6 * side.cpu_s / timed
        rows += [
            _row(f"CPU added per request, {mode}", 100 * (cpu / off - 1), "%", off),
            _row(f"bytes sent per request, {mode}", sent / total, "B", None),
            _row(f"requests with a span, {mode}", 100 * len(side.collector.spans) / total, "%", None),
        ]
    return rows


def _row(metric: str, value: float, unit: str, peer: float | None) -> dict[str, Any]:
    row: dict[str, Any] = {"bench": NAME, "metric": metric, "value": value, "unit": unit}
    return row if peer is None else row | {"peer": f"{PEER}, µs of CPU per request", "peer_value": peer}
