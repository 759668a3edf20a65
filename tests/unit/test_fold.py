"""Fold: what is known after each fact, and the sudden empty set that is not believed at once."""

from __future__ import annotations

from mesh import fold
from mesh.model import Endpoint, Health, Proxy, ProxyKind, Roots, ServiceSpec
from regions.model import Cloud, Region, RegionSet

REGIONS = RegionSet(
    (Region("a", Cloud.LOCAL, ("a1",), ("b",), 1, primary=True), Region("b", Cloud.LOCAL, ("b1",), (), 1))
)
START = fold.Facts("a", REGIONS, (ServiceSpec("chat", "/chat"),))


def endpoint(
    name: str, region: str = "a", stage: str = "stable", health: Health = Health.PASSING
) -> Endpoint:
    return Endpoint("chat", region, stage, name, "127.0.0.1", 1, health=health)


def seen(*ends: Endpoint, region: str = "a") -> fold.EndpointsSeen:
    return fold.EndpointsSeen("chat", region, ends)


def test_the_first_snapshot_waits_for_this_region_only() -> None:
    facts = START
    assert "the CA roots" in fold.missing(facts)
    proxy = Proxy("chat-1-sidecar-proxy", ProxyKind.SIDECAR, "chat", "127.0.0.1", 1, "ab")
    for event in (
        fold.ProxiesSeen((proxy,)),
        fold.IntentionsSeen(()),
        fold.RootsSeen(Roots("td", ("pem",))),
        seen(),
    ):
        facts = fold.fold(facts, event, 0.0)
    assert fold.missing(facts) == ("the leaf of chat",)


def test_a_set_that_empties_at_once_is_held_and_believed_later() -> None:
    facts = fold.fold(START, seen(endpoint("1"), endpoint("2")), 0.0)
    facts = fold.fold(facts, seen(), 1.0)
    assert len(facts.endpoints[("chat", "a")]) == 2
    assert fold.overdue(facts, 5.9) == ()
    (event,) = fold.overdue(facts, 6.0)
    facts = fold.fold(facts, event, 6.0)
    assert facts.endpoints[("chat", "a")] == ()
    assert not facts.emptied


def test_a_set_that_comes_back_is_no_longer_suspect() -> None:
    facts = fold.fold(START, seen(endpoint("1"), endpoint("2")), 0.0)
    facts = fold.fold(facts, seen(), 1.0)
    facts = fold.fold(facts, seen(endpoint("1")), 2.0)
    assert [e.instance for e in facts.endpoints[("chat", "a")]] == ["1"]
    assert fold.overdue(facts, 99.0) == ()


def test_the_last_instance_may_leave_at_once() -> None:
    facts = fold.fold(START, seen(endpoint("1")), 0.0)
    assert fold.fold(facts, seen(), 1.0).endpoints[("chat", "a")] == ()


def test_only_instances_that_may_take_requests_count_as_healthy() -> None:
    ends = (
        endpoint("1"),
        endpoint("2", health=Health.DRAINING),
        endpoint("3", stage="canary", health=Health.CRITICAL),
    )
    facts = fold.fold(START, seen(*ends), 0.0)
    assert fold.healthy(facts, "chat") == {("a", "stable"): 1, ("a", "canary"): 0}


def test_old_facts_are_not_changed() -> None:
    facts = fold.fold(START, seen(endpoint("1")), 0.0)
    fold.fold(facts, seen(endpoint("2")), 1.0)
    assert [e.instance for e in facts.endpoints[("chat", "a")]] == ["1"]
