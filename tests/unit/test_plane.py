"""The control plane's tick: news in, resource sets out, bad snapshots refused, nothing rebuilt in vain."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from mesh import fold
from mesh.consul import keys
from mesh.controlplane import plane as module
from mesh.controlplane.metrics import PlaneMetrics
from mesh.controlplane.plane import Plane
from mesh.controlplane.prober import targets
from mesh.controlplane.process import Process
from mesh.controlplane.reporter import Reporter
from mesh.controlplane.status import ProxyView
from mesh.fold import EndpointsSeen, Facts, GatewaysSeen, IntentionsSeen, LeafSeen, ProxiesSeen, RootsSeen
from mesh.model import CANARY, STABLE, Endpoint, Gateway, Health, Proxy, ProxyKind, Roots, ServiceSpec
from mesh.traffic.plan import ConfigPage, Value
from mesh.xds import names
from mesh.xds.lrs import LoadSample
from regions.model import Cloud, Region, RegionSet
from tests.throwaway_ca import ThrowawayCa

REGIONS = RegionSet(
    (Region("a", Cloud.LOCAL, ("a1",), ("b",), 1, primary=True), Region("b", Cloud.LOCAL, ("b1",), ("a",), 1))
)
INGRESS = Proxy(
    "a-ingress", ProxyKind.INGRESS, "ingress-gateway", "127.0.0.1", 8443, "ab", meta={"tls_sds_path": "/x"}
)


class StoppedClock:
    """A clock that stands where it is put."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return 1_000_000.0 + self.now

    async def sleep(self, s: float) -> None:
        await asyncio.sleep(0)


@pytest.fixture(scope="module")
def ca() -> ThrowawayCa:
    return ThrowawayCa()


def ends(region: str, health: Health = Health.PASSING) -> tuple[Endpoint, ...]:
    return tuple(
        Endpoint("chat", region, stage, f"{stage}-{i}", f"127.0.0.{i + 2}", 21000, health=health)
        for i, stage in enumerate((STABLE, STABLE, CANARY))
    )


def ready(ca: ThrowawayCa) -> Plane:
    made = Plane(
        Facts("a", REGIONS, (ServiceSpec("chat", "/chat"),)),
        StoppedClock(),
        PlaneMetrics(CollectorRegistry()),
    )
    leaf = ca.leaf("ingress-gateway", "a")
    made.layouts({})
    for event in (
        ProxiesSeen((INGRESS,)),
        RootsSeen(Roots("td.consul", (ca.pem,))),
        IntentionsSeen(()),
        LeafSeen(leaf),
        EndpointsSeen("chat", "a", ends("a")),
        EndpointsSeen("chat", "b", ends("b")),
        GatewaysSeen("b", (Gateway("b", "b-mesh-gateway", "127.0.0.9", 8443),)),
    ):
        made.fact(event)
    made.page(ConfigPage())
    made.records("a", {})
    return made


def put(made: Plane, text: str, index: int = 7) -> None:
    made.page(ConfigPage({keys.DEFAULT_CANARY: Value(text.encode(), index)}, True, index))


def canary_share(made: Plane) -> int:
    assert made.decision is not None
    return sum(s.weight for s in made.decision.plans["chat"].slices if s.stage == CANARY)


def test_nothing_is_served_before_everything_of_the_own_region_is_known() -> None:
    made = Plane(
        Facts("a", REGIONS, (ServiceSpec("chat", "/chat"),)),
        StoppedClock(),
        PlaneMetrics(CollectorRegistry()),
    )
    assert made.tick() is None
    assert "the CA roots" in made.lacking
    assert "config/traffic/" in made.lacking


def test_a_weight_change_touches_the_routes_and_nothing_else(ca: ThrowawayCa) -> None:
    made = ready(ca)
    before = made.tick()
    put(made, "0.15")
    after = made.tick()
    assert before is not None
    assert after is not None
    assert canary_share(made) == 1500
    old, new = before["a-ingress"], after["a-ingress"]
    changed = {
        (t, name)
        for t in new.by_type
        for name in new.of(t)
        if new.of(t)[name].version != old.of(t)[name].version
    }
    assert changed == {(names.ROUTE, names.ROUTE_CONFIG)}
    assert all(new.of(names.CLUSTER)[n] is old.of(names.CLUSTER)[n] for n in new.of(names.CLUSTER))


def test_a_refused_value_leaves_the_last_good_one_in_force(ca: ThrowawayCa) -> None:
    made = ready(ca)
    put(made, "0.15")
    made.tick()
    made.records("a", {keys.DEFAULT_CANARY: module.Record(1, "a", "0.15", 0.0, 8)})
    put(made, "abc", 9)
    made.tick()
    assert canary_share(made) == 1500
    assert made.decision is not None
    assert made.decision.plans["chat"].refusals[0].kv_index == 9


def test_an_impossible_set_keeps_the_last_good_one_of_that_proxy(ca: ThrowawayCa) -> None:
    made = ready(ca)
    good = made.tick()
    assert good is not None
    made.fact(ProxiesSeen((replace(INGRESS, meta={}),)))
    assert made.tick() == good
    assert "no door" in made.error
    assert made.metrics.registry.get_sample_value("weir_snapshots_refused_total") == 1


def test_times_of_a_change_are_those_of_its_first_news(ca: ThrowawayCa) -> None:
    made = ready(ca)
    made.tick()
    clock = made.clock
    assert isinstance(clock, StoppedClock)
    put(made, "0.1")
    noticed = clock.time()
    clock.now += 5
    put(made, "0.2", 8)
    made.tick()
    clock.now -= 5
    assert made.times.seen == noticed


def test_a_region_that_is_down_gets_no_slice_and_the_far_one_is_probed_through_its_gateway(
    ca: ThrowawayCa,
) -> None:
    made = ready(ca)
    made.tick()
    (target,) = targets(made.inputs.facts)
    assert (target.region, target.address, target.port) == ("b", "127.0.0.9", 8443)
    assert target.sni.endswith("chat.default.b.internal.td.consul")
    made.down(frozenset({"b"}))
    made.tick()
    assert made.decision is not None
    assert {s.region for s in made.decision.plans["chat"].slices} == {"a"}


def test_a_region_without_a_healthy_instance_is_not_probed(ca: ThrowawayCa) -> None:
    made = ready(ca)
    made.fact(EndpointsSeen("chat", "b", ends("b", Health.CRITICAL)))
    assert targets(made.inputs.facts) == ()


def test_an_emptied_set_is_looked_at_again_by_the_tick(ca: ThrowawayCa) -> None:
    made = ready(ca)
    made.tick()
    made.fact(EndpointsSeen("chat", "b", ()))
    made.tick()
    assert made.decision is not None
    assert {s.region for s in made.decision.plans["chat"].slices} == {"a", "b"}
    clock = made.clock
    assert isinstance(clock, StoppedClock)
    clock.now += fold.CONFIRM_S
    made.tick()
    clock.now -= fold.CONFIRM_S
    assert made.decision is not None
    assert {s.region for s in made.decision.plans["chat"].slices} == {"a"}


class Desk:
    """A Consul that takes status documents."""

    def __init__(self) -> None:
        self.observed: dict[str, Any] = {}

    async def kv_put(self, key: str, value: bytes) -> None:
        assert key == keys.status("chat", "a")
        self.observed = json.loads(value)["observed"]


def test_the_status_counts_whole_reports_of_the_current_split_only(ca: ThrowawayCa) -> None:
    """From Envoy's report to the document: what began before a change is of old and new water."""
    made, desk, version = ready(ca), Desk(), ["one"]
    made.tick()
    clock = StoppedClock()
    reporter = Reporter(
        desk,  # type: ignore[arg-type]
        made,
        clock,
        lambda: [ProxyView("a-ingress", version[0])],
        lambda: version[0],
        dict,
    )

    def seen(at: float, requests: int) -> tuple[int, float | None]:
        """After a report of a second and a half that ends at `at`."""
        clock.now = at
        owners = [LoadSample("chat", "a", stage, requests, 0, 1.5) for stage in (STABLE, CANARY)]
        Process._on_load(SimpleNamespace(reporter=reporter), "a-ingress", owners)  # type: ignore[arg-type]
        asyncio.run(reporter.tick())
        return desk.observed["requests"], desk.observed["canary"]

    asyncio.run(reporter.tick())
    assert seen(102.0, 10) == (20, 0.5)
    version[0] = "two"
    asyncio.run(reporter.tick())
    assert seen(103.0, 7) == (0, None), "it began at 101.5, the change was at 102"
    assert seen(104.0, 3) == (6, 0.5)
