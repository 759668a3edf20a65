"""What dies behind the ingress and what the client sees of it: nothing, if it can be helped."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import ssl
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web

from mesh.model import CANARY, FULL, STABLE, Health, MeshSnapshot
from mesh.xds import names
from mesh.xds.inbound import colour
from tests import xds_samples as samples
from tests.contract.test_xds_ingress import CANARY_HEADER, HTTP, INGRESS, call, echo, running, two_regions
from tests.mini_mesh import MiniMesh, fetch, plan, until
from tests.open_loop import Answer, ask, closed_loop, colours, failures, open_loop
from tests.throwaway_ca import ThrowawayCa
from tests.xds_samples import CN, US

pytestmark = pytest.mark.real

RATE = 100.0
SLOWER = 3
"""In stories of who is noticed how soon: tries of those who live must not run out on a busy machine."""
URL = f"{HTTP}/chat/x"


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="weir-", dir="/tmp") as name:
        yield Path(name)


def pairs() -> MeshSnapshot:
    """Two stable instances in each region, no canary; traffic in halves."""
    ends = tuple(samples.endpoint(r, STABLE, n) for r in (CN, US) for n in (0, 1))
    return replace(
        two_regions(), endpoints=ends, plans={"chat": plan("chat", (CN, STABLE, 5000), (US, STABLE, 5000))}
    )


async def brisk(request: web.Request) -> web.Response:
    """Long enough in flight that a fault always hits some."""
    await asyncio.sleep(0.03)
    return await echo(request)


def sidecars(mesh: MiniMesh, region: str) -> list[int]:
    ours = [e for e in mesh.snapshot.endpoints if e.region == region]
    return [mesh.envoys[f"{e.instance}-sidecar-proxy@{e.region}"].process.pid for e in ours]


async def under_load(http, fault) -> list:
    """Load for 6 s of slow motion; the fault comes when a sixth of it has been sent, and all have served by
    then."""
    assert not failures(await closed_loop(http, URL, [{}] * 40))

    def next_one(number: int) -> Mapping[str, str]:
        if number == RATE:
            fault()
        return {}

    return await open_loop(http, URL, RATE / SLOWER, int(6 * RATE), next_one)


@asynccontextmanager
async def loaded(http) -> AsyncIterator[list[Answer]]:
    """Load for as long as the block takes; all answers are there after it."""
    answers: list[Answer] = []
    over = asyncio.Event()

    async def send() -> None:
        under_way = []
        while not over.is_set():
            under_way.append(asyncio.create_task(ask(http, URL)))
            await asyncio.sleep(1 / RATE)
        answers.extend(await asyncio.gather(*under_way))

    sending = asyncio.create_task(send())
    try:
        yield answers
    finally:
        over.set()
        await sending


async def left_to(http, wanted: str) -> None:
    """Wait until nobody is sent to the others even to try."""

    async def alone() -> bool:
        answers = await closed_loop(http, URL, [{}] * 40)
        assert not failures(answers)
        return set(colours(answers)) == {wanted} and {a.attempts for a in answers} == {1}

    await until(f"requests go to {wanted} at once", alone)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_or_frozen_group_costs_no_request(folder: Path, how: signal.Signals) -> None:
    """Retries cannot leave a priority by themselves (TRAPS, pain 6): ejection has to be faster than they are.

    Both at once: with Envoy's default merge window the second host would have got traffic for a second more.
    """

    async def story() -> None:
        async with running(folder, pairs(), brisk, watchful=True, slower=SLOWER) as (mesh, http):
            answers = await under_load(http, lambda: [os.kill(pid, how) for pid in sidecars(mesh, CN)])
            assert not failures(answers)
            assert set(colours(answers)) == {colour(CN, STABLE), colour(US, STABLE)}
            await left_to(http, colour(US, STABLE))
            assert any(a.attempts > 1 for a in answers), "the fault hit nothing, so this proves nothing"

    asyncio.run(story())


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_or_frozen_mesh_gateway_costs_no_request(folder: Path, how: signal.Signals) -> None:
    async def story() -> None:
        async with running(folder, pairs(), brisk, watchful=True, slower=SLOWER) as (mesh, http):
            gateway = mesh.envoys[f"{US}-mesh-gateway"].process.pid
            answers = await under_load(http, lambda: os.kill(gateway, how))
            assert not failures(answers)
            await left_to(http, colour(CN, STABLE))

    asyncio.run(story())


def test_an_application_that_hangs_behind_a_living_sidecar_costs_no_request(folder: Path) -> None:
    """In the other region, where the ingress sees one gateway and not the instances, and /health says 200.

    Nobody can tell the instance from its sibling there, so the whole region is left while requests are tried
    elsewhere; the hung one is the one that the ingress' connection happens to lead to.
    """

    async def story() -> None:
        hung, asked = set[str](), []

        async def handler(request: web.Request) -> web.Response:
            host = request.transport.get_extra_info("sockname")[0]
            if host.startswith("127.103.2."):
                asked.append(host)
            if host in hung:
                await asyncio.sleep(3600)
            return await brisk(request)

        async with running(folder, pairs(), handler, watchful=True, slower=SLOWER) as (_, http):
            answers = await under_load(http, lambda: hung.add(asked[-1]))
            assert not failures(answers)
            assert any(a.attempts > 1 for a in answers), "the fault hit nothing, so this proves nothing"
            assert not failures(await closed_loop(http, URL, [{}] * 100))

    asyncio.run(story())


def test_a_sick_instance_behind_a_gateway_does_not_take_its_siblings_along(folder: Path) -> None:
    """The ingress' health check keeps its connection, and through a gateway that leads to one of the two.

    Each is sick once, so one of them is the one that the check asks. Its own region's gateway hears of it
    last, so that connections which the sidecar sends away may well come back to it.
    """
    gateway = f"{US}-mesh-gateway"

    async def story() -> None:
        async with running(folder, pairs(), brisk, watchful=True) as (mesh, http):
            for sick in ("127.103.2.10", "127.103.2.11"):
                mesh.sick = set()
                ends = tuple(
                    replace(e, health=Health.CRITICAL if e.address == sick else Health.PASSING)
                    for e in mesh.snapshot.endpoints
                )
                mesh.update(lambda s, ends=ends: replace(s, endpoints=ends), late={gateway})
                await _asked_again()
                mesh.sick = {sick}
                mesh.publish()
                await _asked_again()

                async def shared() -> bool:
                    answers = await closed_loop(http, URL, [{}] * 40)
                    assert not failures(answers)
                    return set(colours(answers)) == {colour(CN, STABLE), colour(US, STABLE)}

                await until("the region serves by the other one", shared)

    asyncio.run(story())


async def _asked_again() -> None:
    """Wait until the ingress has asked each of its hosts more than once."""
    enough = await _checks() + 15

    async def checked() -> bool:
        return await _checks() > enough

    await until("the ingress asked again, more than once", checked)


async def _checks() -> int:
    """Active checks that the ingress has made of its three hosts for us-east-1."""
    name = f"cluster.chat~{US}~stable.health_check.attempt"
    answer = await fetch(f"http://{INGRESS}:19000/stats?filter={name}$")
    assert answer is not None
    return int(answer[1].rsplit(":", 1)[1])


def test_the_remote_canary_goes_and_comes_on_the_same_gateway_address(folder: Path) -> None:
    """One host for both stages: nobody may be lost, the colour must come back, and the header tells."""

    async def story() -> None:
        snap = replace(two_regions(), plans={"chat": plan("chat", (US, CANARY, FULL))})
        async with running(folder, snap, brisk, watchful=True) as (mesh, http):
            everybody = mesh.snapshot.endpoints
            async with loaded(http) as answers:
                await until("the canary serves", lambda: _coloured(http, colour(US, CANARY)))
                mesh.update(
                    lambda s: replace(
                        s, endpoints=tuple(e for e in s.endpoints if (e.region, e.stage) != (US, CANARY))
                    )
                )
                await until("stable stands in", lambda: _coloured(http, colour(US, STABLE)))
                mesh.update(lambda s: replace(s, endpoints=everybody))
                await until("the canary is back", lambda: _coloured(http, colour(US, CANARY)))
            assert not failures(answers)
            assert set(colours(answers)) == {colour(US, CANARY), colour(US, STABLE)}

    asyncio.run(story())


async def _coloured(http, wanted: str) -> bool:
    return (await ask(http, URL)).colour == wanted


def test_an_instance_that_drains_behind_a_gateway_gets_nothing_new_and_ends_its_streams(folder: Path) -> None:
    """Pain 10. The ingress holds connections through the gateway to it; EDS alone would not move them."""

    async def story() -> None:
        release, asked = asyncio.Event(), set()

        async def handler(request: web.Request) -> web.StreamResponse:
            asked.add(request.transport.get_extra_info("sockname")[0])
            answer = web.StreamResponse()
            await answer.prepare(request)
            await answer.write(b"first\n")
            if "wait" in request.query:
                await release.wait()
            await answer.write(b"last\n")
            return answer

        snap = replace(pairs(), plans={"chat": plan("chat", (US, STABLE, FULL))})
        async with running(folder, snap, handler, watchful=True) as (mesh, http):
            streams = [await http.get(f"{URL}?wait=1") for _ in range(4)]
            [leaving] = asked  # few enough for one connection, and it has room for more
            ends = tuple(
                replace(e, health=Health.DRAINING) if e.address == leaving else e
                for e in mesh.snapshot.endpoints
            )
            mesh.update(lambda s: replace(s, endpoints=ends))
            await mesh.settled()

            async def left() -> bool:
                asked.clear()
                assert not failures(await closed_loop(http, URL, [{}] * 60))
                return leaving not in asked

            await until("no new request reaches it", left)
            release.set()
            bodies = [await stream.read() for stream in streams]
            assert bodies == [b"first\nlast\n"] * len(streams)

    asyncio.run(story())


def test_a_dead_canary_is_answered_by_stable_and_says_so(folder: Path) -> None:
    async def story() -> None:
        async with running(folder, two_regions(), brisk, watchful=True) as (mesh, http):
            mesh.envoys[f"chat-canary-0-sidecar-proxy@{CN}"].kill()
            answers = await closed_loop(http, URL, [CANARY_HEADER] * 100)
            assert not failures(answers)
            assert colours(answers)[colour(CN, STABLE)] > 20
            assert set(colours(answers)) == {colour(CN, STABLE), colour(US, CANARY)}

    asyncio.run(story())


def test_when_everybody_looks_dead_requests_are_tried_rather_than_refused(folder: Path) -> None:
    """The last resort (clusters.PANIC_PERCENT): a wrong signal about all must not take down what works."""

    async def story() -> None:
        async with running(folder, pairs(), brisk, watchful=True) as (mesh, http):
            sick = tuple(replace(e, health=Health.CRITICAL) for e in mesh.snapshot.endpoints)
            mesh.update(lambda s: replace(s, endpoints=sick))

            async def panicked() -> bool:
                await closed_loop(http, URL, [{}] * 10)
                stats = await fetch(
                    f"http://{INGRESS}:19000/stats?filter=cn-north-1~stable.lb_healthy_panic$"
                )
                return stats is not None and not stats[1].strip().endswith(": 0")

            await until("panic", panicked)
            assert not failures(await closed_loop(http, URL, [{}] * 100))

    asyncio.run(story())


def test_certificates_of_a_new_root_come_without_a_lost_request(folder: Path) -> None:
    async def story() -> None:
        async with running(folder, pairs(), brisk, watchful=True) as (mesh, http):
            old, new = mesh.ca, ThrowawayCa()
            async with loaded(http) as answers:
                both = replace(mesh.snapshot.roots, pems=(old.pem, new.pem))
                mesh.update(lambda s: replace(s, roots=both))
                await mesh.settled()
                mesh.ca = new
                mesh.publish()
                await mesh.settled()
                mesh.update(lambda s: replace(s, roots=replace(both, pems=(new.pem,))))
                await mesh.settled()
                assert not failures(await closed_loop(http, URL, [{}] * 200))
            assert not failures(answers)
            # New connections too: the old root is trusted no more.
            refused = old.client("ingress-gateway", CN, folder)
            refused.verify_mode = ssl.CERT_NONE
            assert (await call("https://127.103.1.10:21000", refused)).status == 0

    asyncio.run(story())


def test_the_mesh_gateway_closes_unknown_names_and_a_new_service_disturbs_no_stream(folder: Path) -> None:
    async def story() -> None:
        release = asyncio.Event()

        async def stream(request: web.Request) -> web.StreamResponse:
            answer = web.StreamResponse()
            await answer.prepare(request)
            await answer.write(b"first\n")
            await release.wait()
            await answer.write(b"last\n")
            return answer

        snap = replace(two_regions(), plans={"chat": plan("chat", (US, STABLE, FULL))})
        async with running(folder, snap, stream, watchful=True) as (mesh, http):
            gateway = mesh.snapshot.gateways[0]
            with pytest.raises(OSError):
                await asyncio.to_thread(
                    _hello, gateway.address, gateway.port, "stable.other.default.moon.internal.x"
                )
            async with http.get(URL) as answer:
                assert await answer.content.readline() == b"first\n"
                other = replace(samples.SPEC, name="other", prefix="/other")
                mesh.update(lambda s: replace(s, services=(*s.services, other)))
                await mesh.settled()
                sni = names.sni("other", STABLE, US, samples.TRUST_DOMAIN)

                async def listed() -> bool:
                    dump = await fetch(
                        f"http://{gateway.address}:19000/config_dump?resource=dynamic_listeners"
                    )
                    return dump is not None and sni in dump[1]

                await until("the new service has a chain", listed)
                release.set()
                assert await answer.content.readline() == b"last\n"
            stats = await fetch(f"http://{gateway.address}:19000/stats?filter=listener_in_place_updated")
            assert stats is not None
            assert stats[1].strip().endswith(": 1")

    asyncio.run(story())


def _hello(address: str, port: int, name: str) -> None:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with (
        socket.create_connection((address, port), timeout=10) as raw,
        context.wrap_socket(raw, server_hostname=name),
    ):
        pass
