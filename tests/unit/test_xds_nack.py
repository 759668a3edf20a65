"""Rejections: hold, back-off, quarantine, bisection, alarm; never a loop.

Law: pure; time is a number.
"""

from __future__ import annotations

import pytest

from mesh.xds import names
from mesh.xds.nack import FIRST_PAUSE_S, LONGEST_PAUSE_S, Quarantine, Trouble, culprits
from mesh.xds.resource_set import ResourceSet, gather
from mesh.xds.stream import DeltaStream, Heard
from mesh.xds.wire import Push, Request
from tests.fakes.envoy import FakeEnvoy, MemoryLink, wanted
from tests.fakes.sets import cluster, endpoints, listener, routes, simple

A, B, C = "chat.cn-north-1.stable", "chat.cn-north-1.canary", "chat.us-east-1.stable"


class Refusing:
    """Rejects what is in `bad`: (name, version)."""

    def __init__(self) -> None:
        self.bad: set[tuple[str, str]] = set()
        self.seen: list[tuple[str, str]] = []

    def __call__(self, _type_url: str, name: str, version: str) -> str | None:
        self.seen.append((name, version))
        return "proto constraint validation failed" if (name, version) in self.bad else None

    def offered(self, name: str, version: str) -> int:
        return self.seen.count((name, version))


def link(desired: ResourceSet, refusing: Refusing, *, names_errors: bool = True) -> MemoryLink:
    made = MemoryLink(FakeEnvoy(reject=refusing, names_errors=names_errors), DeltaStream("ingress", 0.0))
    made.core.publish(desired)
    made.send(made.envoy.connect())
    made.settle()
    return made


def with_bad(refusing: Refusing, *, revision: int = 2) -> ResourceSet:
    """A set in which C is new and bad, and A and B have changed."""
    desired = simple({A: 9_000, B: 1_000}, extra=[cluster(C, revision), endpoints(C)], **{A: 2, B: 2})
    refusing.bad.add((C, desired.of(names.CLUSTER)[C].version))
    return desired


@pytest.mark.parametrize("names_errors", [True, False], ids=["error names it", "found by halving"])
def test_one_bad_cluster_is_quarantined_and_the_others_are_applied(names_errors: bool) -> None:
    refusing = Refusing()
    got = link(simple({A: 9_000, B: 1_000}), refusing, names_errors=names_errors)
    desired = with_bad(refusing)
    got.core.publish(desired)
    got.settle_through_time()
    expected = wanted(desired)
    del expected[names.CLUSTER][C]
    del expected[names.ENDPOINT][C]
    assert got.envoy.versions() == expected
    state = got.core.state()
    assert state.types[names.CLUSTER].quarantined == {C: state.types[names.CLUSTER].nack}
    assert "validation failed" in (state.alarm or "")
    assert not state.types[names.CLUSTER].applied
    assert state.types[names.ROUTE].applied


def test_no_resend_loop_while_the_content_is_the_same() -> None:
    refusing = Refusing()
    got = link(simple({A: 9_000, B: 1_000}), refusing)
    desired = with_bad(refusing)
    for _ in range(50):
        got.now += 1.0
        got.core.publish(desired)
        got.settle_through_time(0.5)
    assert refusing.offered(C, desired.of(names.CLUSTER)[C].version) == 1
    assert got.poll() == ()


def test_a_repaired_resource_is_offered_and_the_alarm_ends() -> None:
    refusing = Refusing()
    got = link(simple({A: 9_000, B: 1_000}), refusing)
    got.core.publish(with_bad(refusing))
    got.settle_through_time()
    repaired = simple({A: 9_000, B: 1_000}, extra=[cluster(C, 3), endpoints(C)], **{A: 2, B: 2})
    got.core.publish(repaired)
    got.settle_through_time()
    assert got.envoy.versions() == wanted(repaired)
    assert got.core.state().alarm is None
    assert got.core.state().applied


def test_a_bad_new_version_leaves_the_last_good_one_and_its_routes() -> None:
    refusing = Refusing()
    good = simple({A: 9_000, B: 1_000})
    got = link(good, refusing)
    bad = simple({A: 5_000, B: 5_000}, **{B: 7})
    refusing.bad.add((B, bad.of(names.CLUSTER)[B].version))
    got.core.publish(bad)
    got.settle_through_time()
    assert got.envoy.versions()[names.CLUSTER] == wanted(good)[names.CLUSTER]
    assert got.envoy.versions()[names.ROUTE] == wanted(bad)[names.ROUTE]


def test_routes_to_a_cluster_that_was_never_accepted_are_held_and_say_so() -> None:
    refusing = Refusing()
    good = simple({A: 10_000})
    got = link(good, refusing)
    desired = simple({A: 5_000, C: 5_000})
    refusing.bad.add((C, desired.of(names.CLUSTER)[C].version))
    got.core.publish(desired)
    got.settle_through_time()
    assert got.envoy.versions()[names.ROUTE] == wanted(good)[names.ROUTE]
    assert C in (got.core.state().types[names.ROUTE].held or "")


def test_a_bad_route_table_is_held_and_the_old_clusters_stay() -> None:
    refusing = Refusing()
    got = link(simple({A: 5_000, B: 5_000}), refusing)
    desired = simple({A: 10_000})
    refusing.bad.add(("ingress", desired.of(names.ROUTE)["ingress"].version))
    got.core.publish(desired)
    got.settle_through_time()
    assert B in got.envoy.versions()[names.CLUSTER]
    assert got.envoy.nacks == 1


def test_a_reconnect_does_not_offer_the_refused_version_again() -> None:
    refusing, quarantine = Refusing(), Quarantine()
    envoy = FakeEnvoy(reject=refusing)
    first = MemoryLink(envoy, DeltaStream("ingress", 0.0, quarantine))
    first.core.publish(simple({A: 9_000, B: 1_000}))
    first.send(envoy.connect())
    first.settle()
    desired = with_bad(refusing)
    first.core.publish(desired)
    first.settle_through_time()
    second = MemoryLink(envoy, DeltaStream("ingress", 100.0, quarantine), 100.0)
    second.core.publish(desired)
    second.send(envoy.connect())
    second.settle_through_time()
    assert refusing.offered(C, desired.of(names.CLUSTER)[C].version) == 1
    assert "validation failed" in (second.core.state().alarm or "")


def test_what_a_rejected_update_applied_in_part_is_set_right_after_a_reconnect() -> None:
    """Envoy applied the good half, was cut off, and still tells the old versions: they prove nothing."""
    refusing, quarantine = Refusing(), Quarantine()
    envoy = FakeEnvoy(reject=refusing)
    good = simple({A: 9_000, B: 1_000})
    first = MemoryLink(envoy, DeltaStream("ingress", 0.0, quarantine))
    first.core.publish(good)
    first.send(envoy.connect())
    first.settle()
    first.core.publish(with_bad(refusing))
    first.poll()
    first.take_one()
    first.take_one()
    while first.to_server:
        first.serve_one()
    assert envoy.nacks == 1
    assert envoy.config[names.CLUSTER][A].version != envoy.told[names.CLUSTER][A]
    second = MemoryLink(envoy, DeltaStream("ingress", 9.0, quarantine), 9.0)
    second.core.publish(good)
    second.send(envoy.connect())
    second.settle_through_time()
    assert envoy.versions() == wanted(good)


def test_back_off_doubles_up_to_its_cap() -> None:
    trouble = Trouble()
    push = Push(names.ROUTE, (routes({A: 10_000}),), (), "1")
    pauses = []
    for step in range(12):
        trouble.nacked(push, "no", now=100.0 * step)
        pauses.append(trouble.not_before - 100.0 * step)
    assert pauses[:3] == pytest.approx([FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S])
    assert max(pauses) == pytest.approx(LONGEST_PAUSE_S)


def test_each_new_bad_version_costs_one_push_per_back_off_step() -> None:
    core = DeltaStream("p", 0.0)
    core.publish(gather([cluster(A)]))
    core.request(Request(names.CLUSTER), 0.0)
    sent, now = 0, 0.0
    for revision in range(2, 402):
        core.publish(gather([cluster(A, revision)]))
        for push in core.poll(now):
            sent += 1
            assert core.request(Request(push.type_url, nonce=push.nonce, error="no"), now).kind is Heard.NACK
        now += 0.01
    assert sent <= 8  # 0.05 + 0.1 + 0.2 + ... reaches 4 s after seven steps


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ("Error adding/updating cluster(s) chat.a.stable: bad", {"chat.a.stable"}),
        (
            "Error adding/updating cluster(s) chat.a.stable-2: bad, chat.b.x: worse",
            {"chat.a.stable-2", "chat.b.x"},
        ),
        ("chat.a.stable.", {"chat.a.stable"}),
        ("my-chat.a.stable", set()),
        ("something broke", set()),
    ],
)
def test_who_is_to_blame(error: str, expected: set[str]) -> None:
    push = Push(
        names.CLUSTER, tuple(cluster(n) for n in ("chat.a.stable", "chat.a.stable-2", "chat.b.x")), (), "1"
    )
    assert culprits(push, error) == expected


def test_a_refused_removal_is_not_repeated() -> None:
    core = DeltaStream("p", 0.0)
    core.publish(gather([cluster(A), cluster(B)]))
    core.request(Request(names.CLUSTER), 0.0)
    (push,) = core.poll(0.0)
    core.request(Request(names.CLUSTER, nonce=push.nonce), 0.0)
    core.publish(gather([cluster(A)]))
    (push,) = core.poll(10.0)
    assert push.removed == (B,)
    core.request(Request(names.CLUSTER, nonce=push.nonce, error="no"), 10.0)
    assert core.poll(100.0) == ()


def test_listener_rejections_name_the_listener() -> None:
    refusing = Refusing()
    good = simple({A: 10_000})
    got = link(good, refusing)
    other = listener(port=1)
    refusing.bad.add(("ingress", other.version))
    got.core.publish(gather([*(r for r in good if r.type_url != names.LISTENER), other]))
    got.settle_through_time()
    assert got.envoy.versions() == wanted(good)
    assert set(got.core.state().types[names.LISTENER].quarantined or {}) == {"ingress"}
