"""A few real Envoys fed by the real ADS server, without Consul: the stage for tests of the builders.

Law: everything (processes, sockets, addresses, files) belongs to one MiniMesh and is gone when its context
ends. Addresses are 127.103.<region index>.<x> as in docs/architecture.md. Facts enter as a MeshSnapshot; the
test changes them with `update` and waits for what it can observe, never for time.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import subprocess
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry

from mesh import tools
from mesh.clock import SystemClock
from mesh.model import FULL, Endpoint, Gateway, MeshSnapshot, Proxy, ProxyKind, Roots, Slice, TrafficPlan
from mesh.xds import auth, clusters
from mesh.xds.bootstrap import ProxyIdentity, bootstrap
from mesh.xds.pb import Json, seconds
from mesh.xds.resources import build
from mesh.xds.server import AdsServer
from tests.throwaway_ca import ThrowawayCa

DEADLINE_S = 60.0
LONG_S = 60.0
"""No machine stands still for that long."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def until(what: str, probe: Callable[[], Awaitable[bool]]) -> None:
    """Poll until `probe` says yes. AssertionError naming `what` after DEADLINE_S."""
    loop = asyncio.get_running_loop()
    end = loop.time() + DEADLINE_S
    while not await probe():
        if loop.time() > end:
            raise AssertionError(f"still not so after {DEADLINE_S:g} s: {what}")
        await asyncio.sleep(0.05)


@dataclass(slots=True)
class Envoy:
    """One running Envoy."""

    process: subprocess.Popen[bytes]
    admin: str
    log: Path

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class MiniMesh:
    """`async with MiniMesh(folder, snapshot) as mesh:` — the ADS servers, and whatever is started on them.

    One ADS server per region, as in life; each region sees the same snapshot with its own name in it.
    """

    def __init__(self, folder: Path, snapshot: MeshSnapshot, ca: ThrowawayCa) -> None:
        self.folder, self.ca, self.snapshot = folder, ca, snapshot
        self._proxies: dict[str, tuple[str, Proxy]] = {}
        self._servers: dict[str, AdsServer] = {}
        self.sick: set[str] = set()
        self._stack = AsyncExitStack()
        self.envoys: dict[str, Envoy] = {}
        self.loads: dict[str, list[Any]] = {}

    async def __aenter__(self) -> MiniMesh:
        for region in self.snapshot.regions.names:
            proxies = lambda region=region: {i: p for i, (r, p) in self._proxies.items() if r == region}  # noqa: E731
            server = AdsServer(
                str(self.socket(region)),
                clock=SystemClock(),
                rng=random.Random(1),
                authenticate=auth.authenticator(proxies),
                metrics=CollectorRegistry(),
            )
            server.on_load = lambda proxy, samples: self.loads.setdefault(proxy, []).extend(samples)
            await server.start()
            self._stack.push_async_callback(server.stop)
            self._servers[region] = server
        return self

    async def __aexit__(self, *_: object) -> None:
        for envoy in self.envoys.values():
            envoy.kill()
        await self._stack.aclose()

    def socket(self, region: str) -> Path:
        return self.folder / f"{region}.sock"

    def update(
        self, change: Callable[[MeshSnapshot], MeshSnapshot], late: Collection[str] = frozenset()
    ) -> None:
        """Replace the snapshot and publish what follows from it to every proxy, but to those in `late`."""
        self.snapshot = change(self.snapshot)
        self.publish(late)

    def publish(self, late: Collection[str] = frozenset()) -> None:
        for proxy_id, (region, proxy) in self._proxies.items():
            if proxy_id in late:
                continue
            seen = replace(
                self.snapshot, region=region, leafs={proxy.service: self.ca.leaf(proxy.service, region)}
            )
            seen.check()
            self._servers[region].publish({proxy_id: build(seen, proxy)})

    async def start(self, region: str, proxy: Proxy, metrics: tuple[str, int] | None = None) -> Envoy:
        """Start an Envoy for this proxy and wait until it has its listeners."""
        token = f"token-of-{proxy.id}"
        proxy = replace(proxy, token_sha256=auth.digest(token))
        self._proxies[proxy.id] = (region, proxy)
        self.publish()
        who = ProxyIdentity(
            proxy.id, proxy.kind, proxy.service, region, token, zone=proxy.zone, stage=proxy.stage
        )
        config = bootstrap(
            who,
            ads_socket=str(self.socket(region)),
            admin=(proxy.address, 19000),
            source_address=proxy.address,
            metrics=metrics,
        )
        path = self.folder / f"{proxy.id}.json"
        path.write_text(json.dumps(config))
        envoy = launch(path, self.folder / f"{proxy.id}.log", f"http://{proxy.address}:19000")
        self.envoys[proxy.id] = envoy
        await self._ready(proxy.id, envoy)
        return envoy

    async def _ready(self, name: str, envoy: Envoy) -> None:
        async def ready() -> bool:
            if envoy.process.poll() is not None:
                raise AssertionError(
                    f"{name} ended with {envoy.process.returncode}: {envoy.log.read_text()[-3000:]}"
                )
            state = await fetch(envoy.admin + "/ready")
            return state is not None and state[0] == 200

        await until(f"Envoy {name} is ready", ready)

    async def warm(self) -> None:
        """Wait until every Envoy's active checks call every host of every cluster healthy."""

        async def all_healthy() -> bool:
            for envoy in self.envoys.values():
                answer = await fetch(envoy.admin + "/clusters")
                flags = re.findall(r"::health_flags::(.*)", answer[1]) if answer else [""]
                if set(flags) != {"healthy"}:
                    return False
            return True

        await until("all hosts are healthy", all_healthy)

    async def settled(self) -> None:
        """Wait until every proxy has acknowledged everything that was published."""

        async def acknowledged() -> bool:
            return all(
                state.applied
                for server in self._servers.values()
                for states in server.proxies().values()
                for state in states
            )

        await until("everything is acknowledged", acknowledged)

    async def serve(self, address: str, port: int, handler: Handler) -> Callable[[], Awaitable[None]]:
        """An application: every path to `handler`, `/health` answered with 200, or 503 while its address is
        in `sick`. Returns how to stop it."""

        async def health(_: web.Request) -> web.Response:
            return web.Response(status=503 if address in self.sick else 200)

        app = web.Application()
        app.router.add_get("/health", health)
        app.router.add_route("*", "/{tail:.*}", handler)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, address, port, reuse_address=True).start()
        self._stack.push_async_callback(runner.cleanup)
        return runner.cleanup

    async def instance(self, end: Endpoint, handler: Handler) -> Envoy:
        """An application on port 9000 and its sidecar on the endpoint's address."""
        await self.serve(end.address, 9000, handler)
        return await self.start(end.region, sidecar_proxy(end))


@contextmanager
def patient() -> Iterator[None]:
    """Clusters built meanwhile take nobody for dead or ill because he is slow: for tests of where requests go
    on a machine that may stand still for seconds, applications and Envoys alike."""
    kinds = ("local_origin_failure", "gateway_failure")
    switches = {f"enforcing_consecutive_{kind}": 0 for kind in kinds}
    real = clusters.health_check, clusters.outlier_detection, clusters._http2

    def http2() -> Json:
        options = real[2]()
        options["explicit_http_config"]["http2_protocol_options"].pop("connection_keepalive")
        return options

    with _rebuilt() as patch:
        patch.setattr(clusters, "health_check", lambda spec: {**real[0](spec), "timeout": seconds(LONG_S)})
        patch.setattr(clusters, "outlier_detection", lambda: {**real[1](), **switches})
        patch.setattr(clusters, "_http2", http2)
        patch.setattr(clusters, "CONNECT_TIMEOUT_S", LONG_S)
        yield


@contextmanager
def slow_motion(factor: float) -> Iterator[None]:
    """Clusters built meanwhile take so many times as long for all that they wait for: the same story, told on
    a machine that is so many times as fast. What a service's spec says is for the caller to stretch."""
    real = clusters.health_check, clusters.outlier_detection, clusters._http2

    def stretched(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: stretched(inner) for key, inner in value.items()}
        duration = isinstance(value, str) and re.fullmatch(r"([\d.]+)s", value)
        return seconds(float(duration[1]) * factor) if duration else value

    with _rebuilt() as patch:
        patch.setattr(clusters, "health_check", lambda spec: stretched(real[0](spec)))
        patch.setattr(clusters, "outlier_detection", lambda: stretched(real[1]()))
        patch.setattr(clusters, "_http2", lambda: stretched(real[2]()))
        patch.setattr(clusters, "CONNECT_TIMEOUT_S", clusters.CONNECT_TIMEOUT_S * factor)
        yield


@contextmanager
def _rebuilt() -> Iterator[pytest.MonkeyPatch]:
    """Builders of clusters keep what they built: what is patched is seen from here on, and nowhere after."""

    def forget() -> None:
        for made in (clusters.ingress_cluster, clusters.gateway_cluster, clusters.local_app):
            made.cache_clear()

    with pytest.MonkeyPatch.context() as patch:
        forget()
        try:
            yield patch
        finally:
            forget()


def launch(config: Path, log: Path, admin: str, *extra: str) -> Envoy:
    """An Envoy that dies with us."""
    binary = str(tools.find("envoy"))
    command = ["setpriv", "--pdeathsig", "KILL", binary, "-c", str(config), "--concurrency", "1"]
    command += [
        "--disable-hot-restart",
        "--log-level",
        "warning",
        "--drain-time-s",
        "600",
        "--drain-strategy",
        "immediate",
        *extra,
    ]
    with log.open("wb") as out:
        return Envoy(subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT), admin, log)


async def fetch(url: str) -> tuple[int, str] | None:
    """Status and text of a GET, None when there is no connection."""
    try:
        async with aiohttp.ClientSession() as http, http.get(url) as answer:
            return answer.status, await answer.text()
    except aiohttp.ClientConnectionError:
        return None


def sidecar_proxy(end: Endpoint) -> Proxy:
    """Its id carries the region: instances are unique per region, but here all live in one world."""
    who = (f"{end.instance}-sidecar-proxy@{end.region}", ProxyKind.SIDECAR, end.service)
    return Proxy(*who, end.address, end.port, "", end.address, 9000, end.stage, end.zone)


def ingress_proxy(address: str, meta: Mapping[str, str], region: str) -> Proxy:
    return Proxy(f"{region}-ingress", ProxyKind.INGRESS, "ingress-gateway", address, 8443, "", meta=meta)


def gateway_proxy(gateway: Gateway) -> Proxy:
    return Proxy(gateway.instance, ProxyKind.MESH_GATEWAY, "mesh-gateway", gateway.address, gateway.port, "")


def plan(service: str, *slices: tuple[str, str, int]) -> TrafficPlan:
    """A plan of these (region, stage, basis points)."""
    pieces = tuple(Slice(*s) for s in slices)
    assert sum(s.weight for s in pieces) in (0, FULL)
    return TrafficPlan(service, pieces, 0.0, "", {})


def roots(ca: ThrowawayCa) -> Roots:
    return Roots(ca.trust_domain, (ca.pem,), "test")
