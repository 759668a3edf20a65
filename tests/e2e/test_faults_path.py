"""Faults on the way of a request: gateways, executors, sidecars, certificates.

Law: every case runs under load on the shared world, and mends what it broke. A stream that has begun may be
cut by the death of its instance and by nothing else; whole requests never fail.
"""

from __future__ import annotations

import urllib.request

import pytest

from mesh.world.addresses import ADMIN
from mesh.world.plan import INGRESS, MESH_GATEWAY
from tests.e2e.breaking import Load, critical, frozen, held, kill, mended, under_load
from tests.e2e.mesh_world import MeshWorld, failures

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

PRIMARY, SECOND, THIRD = "cn-north-1", "us-east-1", "westeurope"


def test_a_mesh_gateway_held_down_moves_its_regions_share_elsewhere_and_back(calm: MeshWorld) -> None:
    others = (PRIMARY, THIRD)
    with under_load(calm, regions=others) as load:
        with held(calm, SECOND, MESH_GATEWAY):
            load.lasts(3.0)
            first = load.sent
            load.lasts(3.0)
            away = load.since(first)
        calm.until("its share comes back", lambda: SECOND in {s.region for s in load.samples[-20:]})
        load.lasts(1.0)
    load.unharmed()
    assert {s.region for s in away} == set(others)


def test_a_hanging_executor_is_left_and_comes_back(calm: MeshWorld) -> None:
    name = "chat-stable-0"
    with under_load(calm) as load:
        with frozen(calm, SECOND, name):
            calm.until("Consul says it", lambda: name in (critical(calm, SECOND) or ()))
            load.lasts(2.0)
        load.lasts(1.0)
    load.unharmed()
    assert any(s.attempts > 1 for s in load.samples), "the fault hit no request, so this proves nothing"


def test_a_draining_executor_ends_its_streams_and_loses_no_request(calm: MeshWorld) -> None:
    """Told to stop as a deployment does it: by SIGTERM."""
    name = "chat-stable-0"
    with (
        under_load(calm, 20) as whole,
        under_load(calm, 3, regions=(SECOND,), stream=True, tokens=1500) as streams,
    ):
        calm.until("a stream is under way there", lambda: streaming(calm, SECOND, 0), 60)
        with held(calm, SECOND, name, "TERM"):
            assert calm.consul(SECOND, "GET", f"/v1/agent/service/{name}")[0] == 404
            streams.lasts(1.0)
        whole.lasts(1.0)
    whole.unharmed()
    streams.unharmed()


def test_a_killed_executor_cuts_its_own_streams_only(calm: MeshWorld) -> None:
    name = "chat-stable-0"
    with (
        under_load(calm, 20) as whole,
        under_load(calm, 3, regions=(SECOND,), stream=True, tokens=1500) as streams,
    ):

        def hit() -> bool:
            """A stream seen a moment ago may have ended before the signal, so it is tried again."""
            calm.until("a stream is under way there", lambda: streaming(calm, SECOND, 0), 60)
            sent = streams.sent
            kill(calm, SECOND, name)
            calm.until("what was under way has ended", lambda: ended(streams, sent), 60)
            return bool(failures(streams.samples))

        calm.until("the fault hits a stream", hit, 120)
        streams.lasts(1.0)
    mended(calm, SECOND)
    whole.unharmed()
    lost = failures(streams.samples)
    assert all(s.cut and s.region == SECOND for s in lost)
    assert len(lost) < len(streams.samples)


def ended(load: Load, sent: int) -> bool:
    """Whether the first `sent` requests have all ended."""
    return len({s.index for s in load.samples if s.index < sent}) == sent


def streaming(world: MeshWorld, region: str, number: int) -> bool:
    """Whether a stream is under way at the region's instance: short requests don't last five looks."""
    what = "filter=cluster.local_app.upstream_rq_active$"
    url = f"http://{world.world.address(region).instance(number)}:{ADMIN}/stats?{what}"

    def busy() -> bool:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return int(answer.read().decode().rpartition(":")[2]) > 0

    return all(busy() for _ in range(5))


def test_a_frozen_ingress_is_named_and_follows_when_it_runs_again(calm: MeshWorld) -> None:
    others = (PRIMARY, THIRD)
    with under_load(calm, regions=others) as load:
        with frozen(calm, SECOND, INGRESS):
            # As long as a slow machine may need for the others, which must not be named; far less than the 35
            # seconds after which the control plane gives the frozen one up.
            done = calm.weir("traffic", "set", "0.2", "--yes", "--json", "--timeout", "8")
            calm.applied(0.2, regions=others)
            told = calm.weir("status", "--json").json["traffic"]["chat"]["per_region"]
            load.lasts(2.0)
        calm.applied(0.2)
    load.unharmed()
    assert (done.code, done.json["applied"], set(done.json["details"])) == (1, False, {SECOND})
    assert f"not yet: {SECOND}-ingress" in done.json["details"][SECOND]
    assert [told[r]["applied"] for r in (PRIMARY, SECOND, THIRD)] == [True, False, True]
    assert told[SECOND]["acknowledged"] < told[SECOND]["connected"]
