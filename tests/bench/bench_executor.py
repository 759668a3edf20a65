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
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

from mesh.clock import SystemClock
from services.assembly import Stack, assemble
from services.engine import Engine, GenerateRequest
from tests.contract.executor_process import PORT, executor

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


def run() -> list[dict[str, Any]]:
    """About three quarters of a minute."""
    rows = []
    for name, options in (("priced", PRICED), ("free", FREE)):
        with tempfile.TemporaryDirectory() as folder:
            flags = [flag for key, value in options.items() for flag in ("--option", f"{key}={value}")]
            with executor(Path(folder), IPS[name], "--engine", "sim", *flags):
                rates = asyncio.run(_rates(options, IPS[name]))
        rows += _rows(name, rates)
    return rows


def _rows(name: str, rates: Mapping[str, float]) -> list[dict[str, Any]]:
    direct, http = rates[DIRECT], rates[HTTP]
    clients = f"{CLIENTS} streaming clients"
    if name == "free":
        return [_row(f"tokens that cost nothing, {clients}", http, "tokens/s", "", direct)]
    lost = 100 * (1 - http / direct)
    return [
        _row(f"token rate lost to HTTP, {clients}", lost, "%", "<= 15 %", direct),
        _row(f"token rate over HTTP, {clients}", http, "tokens/s", "", direct),
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


async def _rates(options: Mapping[str, str], ip: str) -> dict[str, float]:
    """Tokens per second of each way, the mean of its turns."""
    found: dict[str, list[float]] = {DIRECT: [], HTTP: []}
    for way in TURNS:
        if way == HTTP:
            found[way].append(await _turn(_over_http(ip)))
        else:
            engine = assemble(Stack("sim", "echo-1", options), SystemClock(), Random(0))
            await engine.start()
            found[way].append(await _turn(_in_process(engine)))
            await engine.close()
    return {way: sum(rates) / len(rates) for way, rates in found.items()}


async def _turn(reader: Reader) -> float:
    """Tokens per second that all readers got, after the warm-up."""
    got, clock = 0, SystemClock()

    def arrived(tokens: int) -> None:
        nonlocal got
        got += tokens

    tasks = [asyncio.create_task(reader(arrived, i)) for i in range(CLIENTS)]
    try:
        await asyncio.sleep(WARM_UP_S)
        before, start = got, clock.monotonic()
        await asyncio.sleep(TURN_S)
        rate = (got - before) / (clock.monotonic() - start)
        for task in tasks:
            if task.done():
                await task  # it never ends by itself: this raises what went wrong
        return rate
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


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
