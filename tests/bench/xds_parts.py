"""The processes of the xDS scale bench: a server (ours or a naive one) and the stub clients.

Law: each part is its own process, told what to do by lines on stdin, answering with one JSON line on
stdout. Both use CLOCK_MONOTONIC. The naive server pushes the very same bytes, and keeps no protocol state
at all: it is the floor that grpc.aio sets on this machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

import grpc
from envoy.service.discovery.v3 import discovery_pb2
from prometheus_client import CollectorRegistry

from mesh.clock import SystemClock
from mesh.model import Proxy, ProxyKind
from mesh.xds import names
from mesh.xds.grpc_io import OPTIONS
from mesh.xds.resource_set import ResourceSet, gather
from mesh.xds.server import SERVICE, AdsServer
from mesh.xds.wire import Push, encode_body, with_nonce
from tests.fakes.sets import cluster, endpoints, listener, routes

METHOD = f"/{SERVICE}/DeltaAggregatedResources"
TYPES = (names.CLUSTER, names.ENDPOINT, names.LISTENER, names.ROUTE)
CLUSTERS = [
    f"service-{n:02d}.{region}.{stage}"
    for n in range(12)
    for region in ("cn-north-1", "us-east-1", "westeurope")
    for stage in ("stable", "canary")
]
"""12 services in 3 regions and 2 stages: a route table of 3.4 kB, as in FIGURES 1.2 "our floor"."""

FIXED = [listener(), *(cluster(name) for name in CLUSTERS), *(endpoints(name) for name in CLUSTERS)]


def weighted(step: int) -> ResourceSet:
    """The whole set after the `step`-th weight change."""
    return gather([*FIXED, routes({name: 1 + (step + n) % 97 for n, name in enumerate(CLUSTERS)})])


class Side(Protocol):
    """A server under test. `publish` starts one global weight change; `acked` is set when all clients took
    it."""

    async def start(self) -> None: ...
    async def stop(self) -> None: ...
    def publish(self, step: int) -> None: ...
    async def acked(self) -> None: ...


class Ours:
    """The product."""

    def __init__(self, path: str, clients: int) -> None:
        self.registry = CollectorRegistry()
        self.clients, self.expected, self.done = clients, 0, asyncio.Event()
        self.proxies = {
            f"p{n}": Proxy(f"p{n}", ProxyKind.INGRESS, "i", "127.104.1.3", 1, "") for n in range(clients)
        }
        self.server = AdsServer(
            path,
            clock=SystemClock(),
            rng=random.Random(1),
            authenticate=lambda node, _token: self.proxies.get(node),
            metrics=self.registry,
        )
        self.server.on_change = self._look
        self._acks = self.server._metrics.acks.labels("RouteConfiguration")
        self.publish(0)

    async def start(self) -> None:
        await self.server.start()

    async def stop(self) -> None:
        await self.server.stop()

    def publish(self, step: int) -> None:
        """A set object of its own for each proxy, as the control plane builds them."""
        self.expected += self.clients
        self.done.clear()
        self.server.publish({name: weighted(step) for name in self.proxies} if step == 0 else self._sets)

    def prepare(self, step: int) -> None:
        """Build beforehand: the bench measures the push, not the builders."""
        made = weighted(step)
        self._sets = {name: ResourceSet(made.by_type) for name in self.proxies}

    def _look(self) -> None:
        # Read straight from the child: a walk over the registry at each ACK would be the thing measured.
        if self._acks._value.get() >= self.expected:
            self.done.set()

    async def acked(self) -> None:
        await self.done.wait()


class Naive:
    """grpc.aio and ready bytes, nothing else: one queue of one per stream, no subscriptions, no order, no
    state."""

    def __init__(self, path: str, clients: int) -> None:
        self.path, self.clients = path, clients
        self.first = _bodies(weighted(0))
        self.route = self.first[names.ROUTE]
        self.wakes: list[asyncio.Event] = []
        self.acks, self.expected, self.done = 0, 4 * clients, asyncio.Event()

    async def start(self) -> None:
        self.server = grpc.aio.server(options=OPTIONS)
        method = grpc.stream_stream_rpc_method_handler(self._serve)
        self.server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {"DeltaAggregatedResources": method}),)
        )
        self.server.add_insecure_port(f"unix:{self.path}")
        await self.server.start()

    async def stop(self) -> None:
        await self.server.stop(0.1)

    async def _serve(self, _requests: Any, context: Any) -> None:
        wake = asyncio.Event()
        self.wakes.append(wake)
        writer = asyncio.create_task(self._write(context, wake))
        try:
            while (data := await context.read()) is not grpc.aio.EOF:
                if discovery_pb2.DeltaDiscoveryRequest.FromString(data).response_nonce:
                    self.acks += 1
                    if self.acks == self.expected:
                        self.done.set()
        finally:
            writer.cancel()

    async def _write(self, context: Any, wake: asyncio.Event) -> None:
        nonce = 0
        for body in self.first.values():
            nonce += 1
            await context.write(with_nonce(body, str(nonce)))
        while True:
            await wake.wait()
            wake.clear()
            nonce += 1
            await context.write(with_nonce(self.route, str(nonce)))

    def prepare(self, step: int) -> None:
        self._next = _bodies(weighted(step))[names.ROUTE]

    def publish(self, step: int) -> None:
        self.route = self._next
        self.expected += self.clients
        self.done.clear()
        for wake in self.wakes:
            wake.set()

    async def acked(self) -> None:
        await self.done.wait()


def _bodies(desired: ResourceSet) -> dict[str, bytes]:
    return {t: encode_body(Push(t, tuple(desired.of(t).values()), (), "")) for t in TYPES}


async def serve(kind: str, path: str, clients: int, answering: int) -> None:
    """Run a server: `change N` → publish the N-th weights, wait for the ACKs of `answering` clients;
    `end`."""
    side: Any = Ours(path, clients) if kind == "ours" else Naive(path, clients)
    await side.start()
    say(ready=True)
    async for line in commands():
        if line.startswith("joined"):
            await asyncio.wait_for(side.acked(), 60)
            side.clients = answering
            say(rss_mb=rss_mb())
        elif line.startswith("change"):
            side.prepare(int(line.split()[1]))
            cpu, start = time.process_time(), time.monotonic()
            side.publish(int(line.split()[1]))
            await asyncio.wait_for(side.acked(), 60)
            say(seconds=time.monotonic() - start, cpu_s=time.process_time() - cpu, rss_mb=rss_mb())
        else:
            break
    await side.stop()


async def stubs(path: str, clients: int, deaf: int) -> None:
    """Run stub clients, each on a connection of its own. `deaf` of them stop reading when told `deafen`."""
    ready = [asyncio.Event() for _ in range(clients)]
    ears = asyncio.Event()
    ears.set()
    start = time.monotonic()
    tasks = [
        asyncio.create_task(_stub(path, f"p{n}", ready[n], ears if n < deaf else None))
        for n in range(clients)
    ]
    gathered = asyncio.gather(*(event.wait() for event in ready))
    first = asyncio.gather(*tasks)
    await asyncio.wait({gathered, first}, return_when=asyncio.FIRST_COMPLETED)
    say(seconds=time.monotonic() - start)
    async for line in commands():
        if line == "deafen":
            ears.clear()
            say(deaf=deaf)
        else:
            break
    first.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await first


async def _stub(path: str, node: str, ready: asyncio.Event, ears: asyncio.Event | None) -> None:
    options = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1))
    async with grpc.aio.insecure_channel(f"unix:{path}", options=options) as channel:
        call = channel.stream_stream(METHOD)()
        for type_url in TYPES:
            request = discovery_pb2.DeltaDiscoveryRequest(type_url=type_url)
            request.node.id = node
            request.resource_names_subscribe.extend(
                {names.ENDPOINT: CLUSTERS, names.ROUTE: ["ingress"]}.get(type_url, [])
            )
            await call.write(request.SerializeToString())
        seen: set[str] = set()
        while (data := await call.read()) is not grpc.aio.EOF:
            response = discovery_pb2.DeltaDiscoveryResponse.FromString(data)
            if ears is not None:
                await ears.wait()
            answer = discovery_pb2.DeltaDiscoveryRequest(
                type_url=response.type_url, response_nonce=response.nonce
            )
            await call.write(answer.SerializeToString())
            seen.add(response.type_url)
            if len(seen) == len(TYPES):
                ready.set()


async def commands() -> Any:
    """Lines of stdin."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    while line := await reader.readline():
        yield line.decode().strip()


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def rss_mb() -> float:
    """Resident memory of this process, MB (10^6 bytes)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


if __name__ == "__main__":
    role, *rest = sys.argv[1:]
    main: Callable[..., Awaitable[None]] = {"serve": serve, "stubs": stubs}[role]
    asyncio.run(main(*(int(a) if a.isdigit() else a for a in rest)))  # type: ignore[arg-type]
