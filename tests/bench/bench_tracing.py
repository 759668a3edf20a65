"""What traces cost an executor: CPU, time and bytes per request, of all and of errors and one per cent (S21).

Law: figures, no asserts. One process serves all ways (tracing_server.py), so that memory layout, hash seed
and core are the same for all. In each round every way has several turns of some thirty milliseconds, in an
order drawn anew, each from a heap just collected. What counts is the ratio within a round: what else the
machine does changes from second to second, and falls on all ways of a round alike. `off again` is the same
way as `off`, measured as if it were another: what it is off zero by is the noise of all other rows.

CPU is the serving process' own, of all threads; at the end of a round its spans are sent, and that counts.
Collectors and client are other processes. One request in a hundred fails.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import multiprocessing
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any
from urllib.parse import quote

import aiohttp

from tests.bench.tracing_server import ALL, CONTROL, MARK, OFF, SOME, collect

NAME = "tracing"
MODES = (OFF, CONTROL, ALL, SOME)
WARM_UP, ROUNDS, TURNS, TURN, LINES, TOKENS = 2, 30, 10, 50, 16, 16
REQUESTS = TURNS * TURN
"""Of each way in each round, and so between two times of sending: what 100 a second make in the 5 s that the
exporter waits. With more a second, errors+1% costs less."""
FAILING = 100
"""One in so many."""
SEED, DRAWS, SURE = 21, 2000, 0.95
PEER = "the same executor without tracing, in the same rounds"
GOALS = {ALL: "<= 18.3 %", SOME: "<= 2.1 %"}
"""What others claim for the same two modes."""


@dataclass(slots=True)
class Used:
    """Seconds of one way in one round: of each turn, and what sending its spans took at the end."""

    cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    sent_s: float = 0.0

    @property
    def cpu_s(self) -> float:
        """Of one request. The median turn, since what disturbs one turn says nothing of the others."""
        return statistics.median(self.cpu) / TURN + self.sent_s / REQUESTS

    @property
    def wall_s(self) -> float:
        return statistics.median(self.wall) / TURN


Rounds = Sequence[Mapping[str, Used]]


def run() -> list[dict[str, Any]]:
    """About a minute."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    collector = context.Process(target=collect, args=(there, [ALL, SOME]), daemon=True)
    collector.start()
    try:
        with _serving(here.recv()) as process:
            assert process.stdout is not None
            ports = json.loads(process.stdout.readline())
            rounds = asyncio.run(_measure(ports))
        here.send("what came?")
        came = here.recv()
    finally:
        collector.kill()
        collector.join()
    return rows(rounds) + _sent(came)


def _serving(urls: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Ends when it is left: its stdin closes."""
    module = [sys.executable, "-m", "tests.bench.tracing_server"]
    told = [f"{mode}={url}" for mode, url in urls.items()]
    return subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", *module, *told], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )


async def _measure(ports: Mapping[str, int]) -> Rounds:
    chance, numbers = Random(SEED), {mode: itertools.count() for mode in MODES}
    async with aiohttp.ClientSession() as http:
        rounds = [await _round(http, ports, chance, numbers) for _ in range(WARM_UP + ROUNDS)]
    return rounds[WARM_UP:]


async def _round(
    http: aiohttp.ClientSession,
    ports: Mapping[str, int],
    chance: Random,
    numbers: Mapping[str, Iterator[int]],
) -> Mapping[str, Used]:
    used = {mode: Used() for mode in MODES}
    order = chance.sample(MODES * TURNS, len(MODES) * TURNS)
    for mode in order:
        before, since = await _tell(http, ports, "mark"), time.perf_counter()
        await _requests(http, ports[mode], itertools.islice(numbers[mode], TURN))
        used[mode].wall.append(time.perf_counter() - since)
        used[mode].cpu.append((await _tell(http, ports, "mark"))["ended"] - before["begun"])
    for mode in MODES:
        used[mode].sent_s = (await _tell(http, ports, f"flush?mode={quote(mode)}"))["took"]
    return used


async def _tell(http: aiohttp.ClientSession, ports: Mapping[str, int], what: str) -> Mapping[str, float]:
    async with http.get(f"http://127.0.0.1:{ports[MARK]}/{what}") as answer:
        said: dict[str, float] = await answer.json()
        return said


async def _requests(http: aiohttp.ClientSession, port: int, numbers: Iterator[int]) -> None:
    async def line() -> None:
        for number in numbers:
            body = {"prompt": "deep", "max_tokens": TOKENS if number % FAILING else 0, "seed": number}
            async with http.post(f"http://127.0.0.1:{port}/v1/completions", data=json.dumps(body)) as answer:
                await answer.read()

    await asyncio.gather(*(line() for _ in range(LINES)))


def rows(rounds: Rounds) -> list[dict[str, Any]]:
    """Of each way against `off`: added per cent, how sure that is, how far the rounds lie apart, µs."""
    off = 1e6 * statistics.median(turn[OFF].cpu_s for turn in rounds)
    found = []
    for mode in (ALL, SOME, CONTROL):
        added = [100 * (turn[mode].cpu_s / turn[OFF].cpu_s - 1) for turn in rounds]
        slower = [100 * (turn[mode].wall_s / turn[OFF].wall_s - 1) for turn in rounds]
        us = [1e6 * (turn[mode].cpu_s - turn[OFF].cpu_s) for turn in rounds]
        (low, high), (first, _, third) = interval(added), statistics.quantiles(added, n=4)
        name = f"CPU added per request, {mode}, median of {len(rounds)} rounds"
        found += [
            _row(name, statistics.median(added), "%", goal=GOALS.get(mode, "")),
            _row(f"… {mode}, that median at least ({SURE:.0%} sure)", low, "%"),
            _row(f"… {mode}, that median at most ({SURE:.0%} sure)", high, "%"),
            _row(f"… {mode}, between the rounds' quartiles", third - first, "points"),
            _row(f"… {mode}, in µs", statistics.median(us), "µs", off),
            _row(f"… {mode}, time of a turn added", statistics.median(slower), "%"),
        ]
    return found


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Where the median lies, by bootstrap."""
    chance = Random(SEED)
    medians = sorted(statistics.median(chance.choices(values, k=len(values))) for _ in range(DRAWS))
    cut = round(DRAWS * (1 - SURE) / 2)
    return medians[cut], medians[-1 - cut]


def _sent(came: Mapping[str, tuple[int, int]]) -> list[dict[str, Any]]:
    total, found = (WARM_UP + ROUNDS) * REQUESTS, []
    for mode, (received, spans) in came.items():
        found += [
            _row(f"bytes sent per request, {mode}", received / total, "B"),
            _row(f"requests with a span, {mode}", 100 * spans / total, "%"),
        ]
    return found


def _row(metric: str, value: float, unit: str, peer: float | None = None, goal: str = "") -> dict[str, Any]:
    row: dict[str, Any] = {"bench": NAME, "metric": metric, "value": value, "unit": unit, "goal": goal}
    return row if peer is None else row | {"peer": f"{PEER}, µs of CPU per request", "peer_value": peer}
