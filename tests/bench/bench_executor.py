"""What HTTP takes from an engine: 64 clients that stream from an executor, against the same stack in process.

Law: figures, no asserts. Both ways run the same engines (scheduler, sim), the same number of readers, the
same length of answers, in short turns by A B B A. The readers of the executor are this process, which shares
the machine's cores with it, as clients on one machine do. The rows of an engine whose tokens cost next to
nothing say where the executor itself ends; the goal is for the engine as it is priced.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import psutil

from mesh.clock import SystemClock
from services.assembly import Stack, assemble
from services.engine import Engine, GenerateRequest
from tests.contract.executor_process import PORT, Executor, executor

NAME = "executor"
CLIENTS, TOKENS = 64, 256
WARM_UP_S, TURN_S = 1.0, 4.0
PRICED: Mapping[str, str] = {}
"""The sim engine's own prices: 8.2 ms for a step of 64 sequences, 7,800 tokens/s."""
FREE: Mapping[str, str] = {"speed": "100000"}
IPS = {"priced": "127.107.9.1", "free": "127.107.9.2"}
PEER = "the same engine and scheduler in process, without HTTP"
DIRECT, HTTP = "direct", "http"
TURNS = (DIRECT, HTTP, HTTP, DIRECT)
Reader = Callable[[Callable[[int], None], int], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Turn:
    """rate: tokens per second. cpu_s: of the process that serves, for these tokens."""

    rate: float
    tokens: int
    cpu_s: float


def run() -> list[dict[str, Any]]:
    """About three quarters of a minute."""
    rows = []
    for name, options in (("priced", PRICED), ("free", FREE)):
        with tempfile.TemporaryDirectory() as folder:
            flags = [flag for key, value in options.items() for flag in ("--option", f"{key}={value}")]
            with executor(Path(folder), IPS[name], "--engine", "sim", *flags) as it:
                turns = asyncio.run(_turns(options, it))
        rows += _rows(name, turns)
    return rows


def _rows(name: str, turns: Mapping[str, Sequence[Turn]]) -> list[dict[str, Any]]:
    rate = {way: sum(turn.rate for turn in turns[way]) / len(turns[way]) for way in turns}
    cpu = {way: 1e6 * sum(t.cpu_s for t in turns[way]) / sum(t.tokens for t in turns[way]) for way in turns}
    clients = f"{CLIENTS} streaming clients"
    if name == "free":
        return [_row(f"tokens that cost nothing, {clients}", rate[HTTP], "tokens/s", "", rate[DIRECT])]
    lost = 100 * (1 - rate[HTTP] / rate[DIRECT])
    return [
        _row(f"token rate lost to HTTP, {clients}", lost, "%", "<= 15 %", rate[DIRECT]),
        _row(f"token rate over HTTP, {clients}", rate[HTTP], "tokens/s", "", rate[DIRECT]),
        # What the rate would lose where the machine has time for both sides follows from this.
        _row(f"CPU of the serving process per token, {clients}", cpu[HTTP], "us", "", cpu[DIRECT]),
    ]


def _row(metric: str, value: float, unit: str, goal: str, peer: float) -> dict[str, Any]:
    return {
        "bench": NAME,
        "metric": metric,
        "value": value,
        "unit": unit,
        "goal": goal,
        "peer": PEER,
        "peer_value": peer,
    }


async def _turns(options: Mapping[str, str], it: Executor) -> dict[str, list[Turn]]:
    found: dict[str, list[Turn]] = {DIRECT: [], HTTP: []}
    for way in TURNS:
        if way == HTTP:
            found[way].append(await _turn(_over_http(it.ip), psutil.Process(it.process.pid)))
        else:
            engine = assemble(Stack("sim", "echo-1", options), SystemClock(), Random(0))
            await engine.start()
            found[way].append(await _turn(_in_process(engine), psutil.Process()))
            await engine.close()
    return found


async def _turn(reader: Reader, serving: psutil.Process) -> Turn:
    """What all readers got, after the warm-up."""
    got, clock = 0, SystemClock()

    def arrived(tokens: int) -> None:
        nonlocal got
        got += tokens

    tasks = [asyncio.create_task(reader(arrived, i)) for i in range(CLIENTS)]
    try:
        await asyncio.sleep(WARM_UP_S)
        before, start, cpu_s = got, clock.monotonic(), _cpu_s(serving)
        await asyncio.sleep(TURN_S)
        tokens, took = got - before, clock.monotonic() - start
        for task in tasks:
            if task.done():
                await task  # it never ends by itself: this raises what went wrong
        return Turn(tokens / took, tokens, _cpu_s(serving) - cpu_s)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _cpu_s(process: psutil.Process) -> float:
    used = process.cpu_times()
    return float(used.user + used.system)


def _in_process(engine: Engine) -> Reader:
    async def read(arrived: Callable[[int], None], number: int) -> None:
        for turn in itertools.count():
            job = GenerateRequest(
                request_id=f"{number}-{turn}",
                prompt=f"reader {number}",
                max_tokens=TOKENS,
                seed=turn,
                temperature=1.0,
                tenant="default",
                tenant_class="silver",
            )
            async for _ in engine.generate(job):
                arrived(1)

    return read


def _over_http(ip: str) -> Reader:
    """Sockets and counting alone: what a client makes of the events is not the executor's cost."""

    async def read(arrived: Callable[[int], None], number: int) -> None:
        for turn in itertools.count():
            body = json.dumps(
                {"prompt": f"reader {number}", "max_tokens": TOKENS, "seed": turn, "stream": True}
            ).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: {ip}\r\nContent-Length: {len(body)}\r\n"
            incoming, outgoing = await asyncio.open_connection(ip, PORT)
            try:
                outgoing.write(head.encode() + b"Connection: close\r\n\r\n" + body)
                await _count(incoming, arrived)
            finally:
                outgoing.close()

    return read


async def _count(incoming: asyncio.StreamReader, arrived: Callable[[int], None]) -> None:
    """Events of one answer. Raises RuntimeError for anything but a whole stream."""
    if (status := await incoming.readline()).split()[1] != b"200":
        raise RuntimeError(f"the executor answered {status!r}")
    seen, tail, mark = 0, b"", b"data: {"
    while part := await incoming.read(65536):
        part = tail + part
        found = part.count(mark)
        seen += found
        arrived(found)
        # A mark may lie across two reads; a whole one is never counted twice.
        tail = part[-(len(mark) - 1) :]
    if seen != TOKENS:
        raise RuntimeError(f"a stream of {seen} events instead of {TOKENS}")
