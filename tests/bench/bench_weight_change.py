"""From `PUT config/traffic/canary-weight` to the first request on the new split, in one region.

Law: figures, no asserts. Both sides flip the canary between 0 and 1, so that the first answer of the other
stage is the first request on the new split; what is measured includes the write to Consul and the request
itself. The peer is the same RDS push by a bare script into an Envoy of the same kind, without Consul.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from intentions.model import Action, Intention
from mesh.consul import keys
from mesh.consul.client import Consul
from mesh.model import CANARY, FULL, STABLE, Endpoint, MeshSnapshot, ServiceSpec
from mesh.world.wish import Wish
from mesh.xds import names
from mesh.xds.bootstrap import ProxyIdentity, bootstrap
from mesh.xds.resources import build
from regions.model import Cloud, Region, RegionSet
from tests import mini_mesh
from tests.bench.bare_push import BareAds, Prober
from tests.bench.own_world import own_world
from tests.mini_mesh import MiniMesh
from tests.throwaway_ca import ThrowawayCa, server_sds

NAME = "weight_change"
REGION = "us-east-1"
FLIPS, WARM_UP = 100, 10
PEER = "the same RDS push by a bare script, without Consul"

Flip = Callable[[str], Awaitable[None]]


def run() -> list[dict[str, Any]]:
    """About 40 s: a world of one region, then three Envoys of our own."""
    with own_world(Wish(regions=(REGION,), instances=1, canaries=1, token_cost_ms=0.0)) as world:
        where = world.address(REGION)
        url = f"{where.ingress_https}/chat/v1/models"
        ours = asyncio.run(_ours(where.consul_http, url, world.ca_file))
    floor = asyncio.run(_floor())
    return rows(ours, floor)


async def _ours(consul_http: str, url: str, ca_file: Path) -> list[float]:
    async with Consul(consul_http) as consul:

        async def flip(stage: str) -> None:
            await consul.kv_put(keys.DEFAULT_CANARY, b"1" if stage == CANARY else b"0")

        return await measure(url, ssl.create_default_context(cafile=str(ca_file)), flip)


async def measure(url: str, tls: ssl.SSLContext, flip: Flip) -> list[float]:
    """Milliseconds from the order to the first answer of the new stage, sorted; warm-up left out."""
    loop = asyncio.get_running_loop()
    found: list[float] = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=tls)) as http:
        prober = Prober(http, url)
        task = asyncio.create_task(prober.run())
        try:
            for turn in range(WARM_UP + FLIPS):
                stage = CANARY if turn % 2 == 0 else STABLE
                waiting = asyncio.create_task(prober.first(stage))
                # One change at a time: what the last one left to do (records, status) is done by now.
                # Not in step with the prober.
                await asyncio.sleep(0.15 + 0.001 * (turn % 7))
                start = loop.time()
                await flip(stage)
                found.append((await waiting - start) * 1000)
                if task.done():
                    await task
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
    return sorted(found[WARM_UP:])


async def _floor() -> list[float]:
    """The bare script's figures: an ingress of ours fed by BareAds, sidecars fed by the real server."""
    ca = ThrowawayCa()
    snapshot = _snapshot(ca)
    with tempfile.TemporaryDirectory(prefix="weir-floor-") as text:
        folder = Path(text)
        async with MiniMesh(folder, snapshot, ca) as mesh:
            for end in snapshot.endpoints:
                await mesh.instance(end, _answer)
            sds, trust = server_sds(folder, "127.108.1.3")
            proxy = mini_mesh.ingress_proxy("127.108.1.3", {"tls_sds_path": str(sds)}, "a")
            seen = replace(snapshot, leafs={proxy.service: ca.leaf(proxy.service, "a")})
            bare = BareAds(folder / "bare.sock", build(seen, proxy))
            await bare.start()
            envoy = mini_mesh.launch(_config(folder, proxy), folder / "bare.log", "http://127.108.1.3:19000")
            try:
                await mesh._ready("bare ingress", envoy)

                async def flip(stage: str) -> None:
                    moved = replace(seen, plans={"chat": mini_mesh.plan("chat", ("a", stage, FULL))})
                    await bare.push(build(moved, proxy).of(names.ROUTE)[names.ROUTE_CONFIG])

                await _warm(envoy)
                return await measure("https://127.108.1.3:8443/chat/v1/models", trust, flip)
            finally:
                envoy.kill()
                await bare.stop()


def _snapshot(ca: ThrowawayCa) -> MeshSnapshot:
    ends = tuple(
        Endpoint("chat", "a", stage, f"chat-{stage}", f"127.108.1.{10 + i}", 21000)
        for i, stage in enumerate((STABLE, CANARY))
    )
    return MeshSnapshot(
        region="a",
        regions=RegionSet((Region("a", Cloud.LOCAL, ("a1",), (), 1, primary=True),)),
        services=(ServiceSpec("chat", "/chat"),),
        endpoints=ends,
        intentions=(Intention("chat", "ingress-gateway", Action.ALLOW),),
        roots=mini_mesh.roots(ca),
        plans={"chat": mini_mesh.plan("chat", ("a", STABLE, FULL))},
    )


def _config(folder: Path, proxy: Any) -> Path:
    who = ProxyIdentity(proxy.id, proxy.kind, proxy.service, "a", "none", zone="", stage="")
    config = bootstrap(
        who, ads_socket=str(folder / "bare.sock"), admin=("127.108.1.3", 19000), source_address="127.108.1.3"
    )
    path = folder / "bare.json"
    path.write_text(json.dumps(config))
    return path


async def _warm(envoy: mini_mesh.Envoy) -> None:
    async def healthy() -> bool:
        answer = await mini_mesh.fetch(envoy.admin + "/clusters")
        return answer is not None and answer[1].count("health_flags::healthy") >= 3

    await mini_mesh.until("the bare ingress finds its hosts healthy", healthy)


async def _answer(_: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": []})


def rows(ours: list[float], floor: list[float]) -> list[dict[str, Any]]:
    out = []
    for share, goal in ((0.5, "<= 15 ms"), (0.99, "<= 60 ms")):
        value, peer = _at(ours, share), _at(floor, share)
        common = {"bench": NAME, "value": value, "unit": "ms", "peer": PEER, "peer_value": peer}
        name = f"p{share * 100:.0f} of {len(ours)} KV puts to the first request on the new split"
        out.append({**common, "metric": name, "goal": goal})
        if share == 0.5:
            out.append({**common, "metric": f"{name}, against the bare push", "goal": "ratio <= 2"})
    return out


def _at(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, round(share * len(ordered)))]
