"""The ADS server against a real Envoy: what the fake claims of Envoy, and that no request is lost.

Law: one Envoy, one server, one HTTP backend per instance, all on 127.104.x.y; each test ends what it started.
The sets are written by hand (tests.fakes.sets), so the protocol is tested and not the builders.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from envoy.config.cluster.v3 import cluster_pb2
from google.protobuf import text_format
from prometheus_client import CollectorRegistry

from mesh.clock import SystemClock
from mesh.model import Proxy, ProxyKind
from mesh.tools import find
from mesh.xds import names
from mesh.xds.auth import authenticator
from mesh.xds.bootstrap import ProxyIdentity, bootstrap
from mesh.xds.lrs import LoadSample
from mesh.xds.resource_set import Resource, ResourceSet, gather, make
from mesh.xds.server import AdsServer
from tests.fakes.envoy_grpc import until
from tests.fakes.sets import ads, cluster, endpoints, listener, routes

pytestmark = pytest.mark.real

ENVOY, ADMIN, TOKEN = "127.104.1.3", 19_000, "real-envoy-token"
BACKENDS = {"chat.cn-north-1.stable": "127.104.1.10", "chat.cn-north-1.canary": "127.104.1.11"}
STABLE, CANARY = BACKENDS


def a_set(weights: dict[str, int], *extra: Resource, revision: int = 1) -> ResourceSet:
    """Clusters (in this revision) and endpoints of what is routed to, and `extra`."""
    parts: list[Resource] = [listener(address=ENVOY), routes(weights), *extra]
    for name in weights:
        parts += [cluster(name, revision), endpoints(name, 9_000, BACKENDS[name])]
    return gather(parts)


class Bed:
    """Everything of one test."""

    def __init__(self, folder: Path, http: aiohttp.ClientSession) -> None:
        self.folder, self.http = folder, http
        self.socket = folder / "run" / "ads.sock"
        self.samples: list[LoadSample] = []
        self.outcomes: Counter[str] = Counter()
        self.server = self.new_server()

    def new_server(self) -> AdsServer:
        digest = hashlib.sha256(TOKEN.encode()).hexdigest()
        proxies = {"ingress": Proxy("ingress", ProxyKind.INGRESS, "ingress-gateway", ENVOY, 8080, digest)}
        server = AdsServer(
            str(self.socket),
            clock=SystemClock(),
            rng=random.Random(1),
            authenticate=authenticator(lambda: proxies),
            metrics=CollectorRegistry(),
        )
        server.on_load = lambda _proxy, samples: self.samples.extend(samples)
        return server

    async def apply(self, desired: ResourceSet) -> None:
        """Publish and wait until Envoy has accepted it all."""
        self.server.publish({"ingress": desired})
        await until("applied", self.applied)

    def applied(self) -> bool:
        streams = self.server.proxies().get("ingress", ())
        return len(streams) == 1 and streams[0].applied

    async def ask(self) -> str:
        """Name of the instance that answered, or what went wrong."""
        try:
            async with self.http.get(f"http://{ENVOY}:8080/") as response:
                return await response.text() if response.status == 200 else str(response.status)
        except aiohttp.ClientError as error:
            return type(error).__name__

    @asynccontextmanager
    async def load(self) -> AsyncIterator[None]:
        """Requests one after another, all the time; outcomes are counted."""
        stop = asyncio.Event()

        async def client() -> None:
            while not stop.is_set():
                self.outcomes[await self.ask()] += 1

        tasks = [asyncio.create_task(client()) for _ in range(2)]
        try:
            yield
        finally:
            stop.set()
            await asyncio.gather(*tasks)

    def failures(self) -> dict[str, int]:
        return {what: n for what, n in self.outcomes.items() if what not in BACKENDS}

    async def more(self, requests: int = 50) -> None:
        """Let some load pass."""
        goal = self.outcomes.total() + requests
        await until("load passes", lambda: self.outcomes.total() >= goal)

    async def admin(self, path: str) -> Any:
        async with self.http.get(f"http://{ENVOY}:{ADMIN}{path}") as response:
            return await response.json()

    async def stat(self, name: str) -> int:
        answer = await self.admin(f"/stats?format=json&filter=^{name}$")
        return int(answer["stats"][0]["value"])


async def backend(name: str, address: str) -> web.AppRunner:
    async def answer(_request: web.Request) -> web.Response:
        return web.Response(text=name)

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, address, 9_000).start()
    return runner


async def start_envoy(folder: Path, socket: Path) -> asyncio.subprocess.Process:
    who = ProxyIdentity("ingress", ProxyKind.INGRESS, "ingress-gateway", "cn-north-1", TOKEN)
    config = folder / "envoy.json"
    config.write_text(
        json.dumps(bootstrap(who, ads_socket=str(socket), admin=(ENVOY, ADMIN), source_address=ENVOY))
    )
    options = ["--concurrency", "1", "--use-dynamic-base-id", "-l", "warn"]
    command = [str(find("envoy")), "-c", str(config), *options]
    with (folder / "envoy.log").open("wb") as log:
        return await asyncio.create_subprocess_exec(
            "setpriv", "--pdeathsig", "KILL", *command, stdout=log, stderr=log
        )


@asynccontextmanager
async def bed() -> AsyncIterator[Bed]:
    with tempfile.TemporaryDirectory(prefix="weir-", dir="/tmp") as name:
        folder = Path(name)
        runners = [await backend(*pair) for pair in BACKENDS.items()]
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as http:
            made = Bed(folder, http)
            await made.server.start()
            envoy = await start_envoy(folder, made.socket)
            try:
                yield made
            finally:
                envoy.kill()
                await envoy.wait()
                await made.server.stop()
                for runner in runners:
                    await runner.cleanup()


def drive(test: Callable[[Bed], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        async with bed() as made:
            await asyncio.wait_for(test(made), 100)

    asyncio.run(run())


async def serving(made: Bed, weights: dict[str, int]) -> None:
    """Bring Envoy up to the first answer."""
    await made.apply(a_set(weights))
    while await made.ask() not in BACKENDS:  # noqa: ASYNC110 (an Envoy has no event to wait for)
        await asyncio.sleep(0.01)


def test_changes_of_all_kinds_lose_no_request() -> None:
    """New clusters before routes, routes before removals, endpoints again after a cluster changed."""

    async def test(made: Bed) -> None:
        await serving(made, {STABLE: 1})
        async with made.load():
            for turn in range(6):
                await made.apply(a_set({STABLE: 1}, revision=turn + 1))
                await made.apply(a_set({STABLE: 50, CANARY: 50}, revision=turn + 1))
                await made.apply(a_set({CANARY: 1}, revision=turn + 2))
                await made.more(20)
        assert made.failures() == {}
        assert made.outcomes[CANARY] > 0
        assert await made.stat("cluster_manager.cds.update_rejected") == 0
        assert await made.stat("cluster_manager.warming_clusters") == 0

    drive(test)


def test_a_changed_cluster_does_not_wait_for_its_fetch_timeout() -> None:
    async def test(made: Bed) -> None:
        await serving(made, {STABLE: 1})
        await made.apply(a_set({STABLE: 1}, revision=9))
        rows = (await made.admin("/stats?format=json&filter=init_fetch_timeout$"))["stats"]
        assert {row["value"] for row in rows} == {0}, rows
        assert await made.stat("cluster_manager.warming_clusters") == 0

    drive(test)


def unregistered() -> Resource:
    """A cluster that Envoy refuses by name: no such transport socket."""
    message = cluster_pb2.Cluster(name="bad.cn-north-1.stable", type=cluster_pb2.Cluster.EDS)
    message.eds_cluster_config.eds_config.CopyFrom(ads())
    message.transport_socket.name = "no.such.transport.socket"
    return make(message.name, message)


def invalid() -> Resource:
    """A cluster that fails validation before Envoy looks at names."""
    message = cluster_pb2.Cluster(name="bad.cn-north-1.stable", type=cluster_pb2.Cluster.EDS)
    message.eds_cluster_config.eds_config.CopyFrom(ads())
    text_format.Parse("health_checks { http_health_check { path: '/' } }", message)
    return make(message.name, message)


@pytest.mark.parametrize("make_bad", [unregistered, invalid])
def test_a_bad_cluster_is_quarantined_and_the_rest_goes_on(make_bad: Callable[[], Resource]) -> None:
    async def test(made: Bed) -> None:
        await serving(made, {STABLE: 1})
        bad = make_bad()
        async with made.load():
            made.server.publish({"ingress": a_set({CANARY: 1}, bad, endpoints(bad.name), revision=3)})

            def state() -> Any:
                return made.server.proxies()["ingress"][0]

            await until("route moved", lambda: state().types[names.ROUTE].applied)
            await until("blamed", lambda: bool(state().types[names.CLUSTER].quarantined))
            await until("the old cluster went", lambda: state().types[names.CLUSTER].resources == 1)
            await made.more()
            rejected = await made.stat("cluster_manager.cds.update_rejected")
            await made.more(200)
            assert await made.stat("cluster_manager.cds.update_rejected") == rejected <= 3
            assert set(state().types[names.CLUSTER].quarantined) == {bad.name}
            assert "rejected" in state().alarm
            await made.apply(a_set({CANARY: 1}, revision=4))
            assert state().alarm is None
        assert made.failures() == {}
        assert made.outcomes[CANARY] > 0

    drive(test)


def test_control_plane_gone_and_back_loses_no_request_and_sends_nothing() -> None:
    async def test(made: Bed) -> None:
        await serving(made, {STABLE: 1})
        watched = ("cluster_manager.cluster_modified", "listener_manager.listener_modified")
        before = {name: await made.stat(name) for name in watched}
        async with made.load():
            await made.server.stop()
            await made.more(200)
            made.server = made.new_server()
            await made.server.start()
            await made.apply(a_set({STABLE: 1}))
            await made.apply(a_set({CANARY: 1}))
            await made.more()
        assert made.failures() == {}
        assert {name: await made.stat(name) for name in watched} == before
        assert await made.ask() == CANARY

    drive(test)


def test_a_nack_and_a_reconnect_end_well() -> None:
    """envoy#34334 is about this very sequence."""

    async def test(made: Bed) -> None:
        await serving(made, {STABLE: 1})
        ends = endpoints("bad.cn-north-1.stable")
        made.server.publish({"ingress": a_set({STABLE: 1}, unregistered(), ends)})
        await until("blamed", lambda: made.server.proxies()["ingress"][0].alarm is not None)
        await made.server.stop()
        made.server = made.new_server()
        await made.server.start()
        await made.apply(a_set({CANARY: 1}))
        assert await made.ask() == CANARY

    drive(test)


def test_load_reports_of_envoy_tell_cluster_and_place() -> None:
    async def test(made: Bed) -> None:
        await serving(made, {STABLE: 1, CANARY: 1})

        def seen() -> set[tuple[str, str, str]]:
            return {(s.service, s.region, s.stage) for s in made.samples if s.requests}

        async with made.load():
            await until("both reported", lambda: seen() == {tuple(n.split(".")) for n in BACKENDS})
        assert all(0 < s.seconds < 60 for s in made.samples), "a second is asked for"

    drive(test)
