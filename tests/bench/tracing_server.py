"""What bench_tracing measures: one process with the same executor four times, each traced in its own way, and
the collector in another.

Law: started as a process of its own (`-m tests.bench.tracing_server MODE=URL …`), tells its ports in one line
on stdout and ends when its stdin does. Exporters send when `/flush` says so, never in another way's turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import sys
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from random import Random

from aiohttp import web

from mesh.clock import SystemClock
from services.assembly import Stack, assemble
from services.instance import Identity, Instance
from services.listener import Listener
from services.server import Edge, Server
from services.telemetry import spans
from services.telemetry.otel import OtelTracing, otlp
from services.telemetry.trace import MODES, NoTracing, Tracing
from tests.fakes.otlp import Collector

OFF, CONTROL, ALL, SOME = "off", "off again", "all", "errors+1%"
MARK = "mark"
WHO = Identity("chat", "chat-stable-0", "us-east-1", "a", "stable", "7", "echo-1")


def collect(told: Connection, names: list[str]) -> None:
    """A collector per name, in a process of its own: their URLs; then, asked with anything, what came."""
    with contextlib.ExitStack() as stack:
        made = {name: stack.enter_context(Collector().up()) for name in names}
        told.send({name: one.url for name, one in made.items()})
        told.recv()
        told.send({name: (one.received, len(one.spans)) for name, one in made.items()})


def _tracing(mode: str, url: str) -> Tracing:
    if mode not in MODES:
        return NoTracing()
    os.environ |= {"OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_BSP_SCHEDULE_DELAY": "3600000"}
    return OtelTracing(otlp(), MODES[mode], spans.resource(WHO))


async def main(urls: Mapping[str, str]) -> None:
    clock, ports = SystemClock(), {}
    traced = {mode: _tracing(mode, urls.get(mode, "")) for mode in (OFF, CONTROL, ALL, SOME)}
    async with contextlib.AsyncExitStack() as stack:
        for mode, tracing in traced.items():
            engine = assemble(Stack("echo", WHO.model, {}), clock, Random(1))
            await engine.start()
            stack.push_async_callback(engine.close)
            edge = Edge(chance=Random(1), tracing=tracing)
            server = Server(Instance(WHO, engine), clock, debug=False, edge=edge)
            ports[mode] = await _listen(stack, server.app())
        ports[MARK] = await _listen(stack, _marks(traced))
        gc.freeze()  # as an executor does before it serves
        print(json.dumps(ports), flush=True)
        await asyncio.to_thread(sys.stdin.read)
        for tracing in traced.values():
            await tracing.close()


async def _listen(stack: contextlib.AsyncExitStack, app: web.Application) -> int:
    listener = Listener(app, "127.0.0.1", 0)
    stack.push_async_callback(listener.stop)
    await listener.start()
    return listener.port


def _marks(traced: Mapping[str, Tracing]) -> web.Application:
    async def mark(_: web.Request) -> web.Response:
        """CPU used until now, and after that the same heap for whoever is next."""
        ended = time.process_time()
        gc.collect()
        return web.json_response({"ended": ended, "begun": time.process_time()})

    async def flush(request: web.Request) -> web.Response:
        """CPU that it took to send what a way has in its queue."""
        before = time.process_time()
        tracing = traced[request.query["mode"]]
        if isinstance(tracing, OtelTracing):
            await asyncio.to_thread(tracing.flush)
        return web.json_response({"took": time.process_time() - before})

    app = web.Application()
    app.router.add_get("/mark", mark)
    app.router.add_get("/flush", flush)
    return app


if __name__ == "__main__":
    asyncio.run(main(dict(pair.rsplit("=", 1) for pair in sys.argv[1:])))
