"""Conformance of the delta ADS core: every awkward sequence of TRAPS 0, 3.1–3.3 and FIGURES table B.

Law: pure; the fake Envoy raises `Violation` by itself when nonce, order or make-before-break is broken.
"""

from __future__ import annotations

from mesh.xds import names, order
from mesh.xds.resource_set import ResourceSet, gather
from mesh.xds.stream import CDS_WITHIN_S, SETTLE_S, DeltaStream, Heard
from mesh.xds.wire import Push, Request
from tests.fakes.envoy import ALL, FakeEnvoy, MemoryLink, wanted
from tests.fakes.sets import cluster, endpoints, listener, routes, simple

A, B, C = "chat.cn-north-1.stable", "chat.cn-north-1.canary", "chat.us-east-1.stable"


def link(desired: ResourceSet | None = None, envoy: FakeEnvoy | None = None) -> MemoryLink:
    """A connected and settled pair."""
    made = MemoryLink(envoy or FakeEnvoy(), DeltaStream("ingress", 0.0))
    if desired is not None:
        made.core.publish(desired)
    made.send(made.envoy.connect())
    made.settle()
    return made


def types(pushes: tuple[Push, ...]) -> list[str]:
    return [push.type_url for push in pushes]


def ask(core: DeltaStream, type_url: str, *subscribe: str, now: float = 0.0, **more: object) -> None:
    core.request(Request(type_url, tuple(subscribe), **more), now)  # type: ignore[arg-type]


def ack(core: DeltaStream, push: Push, now: float = 0.0) -> None:
    core.request(Request(push.type_url, nonce=push.nonce), now)


# --- the order of a start ---


def test_a_fresh_envoy_ends_with_the_whole_set() -> None:
    desired = simple({A: 9_000, B: 1_000})
    got = link(desired)
    assert got.envoy.versions() == wanted(desired)
    assert got.core.state().applied


def test_upserts_come_in_ads_order() -> None:
    got = link(simple({A: 10_000}))
    first = [type_url for type_url, _, _ in got.envoy.received]
    assert (first[0], first[-1]) == (names.CLUSTER, names.ROUTE)
    assert first.index(names.ENDPOINT) < first.index(names.ROUTE)


def test_routes_wait_for_the_cds_ack_but_endpoints_do_not() -> None:
    """Envoy ACKs CDS only when clusters are warm: holding EDS for that ACK would be a deadlock."""
    core = DeltaStream("ingress", 0.0)
    core.publish(simple({A: 10_000}))
    for type_url, wants in ((names.CLUSTER, ()), (names.LISTENER, ()), (names.ROUTE, ("ingress",))):
        ask(core, type_url, *wants)
    cds, lds = core.poll(0.0)
    assert (cds.type_url, lds.type_url) == (names.CLUSTER, names.LISTENER)
    ask(core, names.ENDPOINT, A)
    (eds,) = core.poll(0.0)
    assert eds.type_url == names.ENDPOINT
    assert A in (core.state().types[names.ROUTE].held or "")
    ack(core, eds)
    assert core.poll(0.0) == ()
    ack(core, cds)
    assert types(core.poll(0.0)) == [names.ROUTE]


def test_before_anything_is_published_the_server_is_silent() -> None:
    """An empty CDS answer because a read has not come yet would be an order to delete."""
    got = link(None)
    assert got.envoy.received == []


def test_a_published_empty_set_is_answered_once_and_deletes_nothing() -> None:
    got = link(ResourceSet({}))
    assert got.envoy.received == [(names.CLUSTER, (), ()), (names.LISTENER, (), ())]


# --- silence ---


def test_nothing_changed_nothing_sent() -> None:
    got = link(simple({A: 10_000}))
    got.core.publish(simple({A: 10_000}))
    assert got.poll() == ()


def test_a_weight_change_touches_rds_alone() -> None:
    got = link(simple({A: 9_000, B: 1_000}))
    got.core.publish(simple({A: 8_000, B: 2_000}))
    assert types(got.poll()) == [names.ROUTE]


def test_one_push_in_flight_and_the_latest_wins() -> None:
    got = link(simple({A: 9_000, B: 1_000}))
    sent: list[tuple[Push, ...]] = []
    for weight in range(1_001, 1_050):
        got.core.publish(simple({A: 10_000 - weight, B: weight}))
        sent.append(got.poll())
    assert [len(pushes) for pushes in sent] == [1] + [0] * 48
    got.settle()
    assert got.envoy.received[-1][0] == names.ROUTE
    assert got.envoy.versions() == wanted(simple({A: 8_951, B: 1_049}))
    assert sum(1 for kind, _, _ in got.envoy.received if kind == names.ROUTE) == 3


def test_a_b_a_within_one_round_trip_ends_right() -> None:
    first, second = simple({A: 9_000, B: 1_000}), simple({A: 8_000, B: 2_000})
    got = link(first)
    got.core.publish(second)
    got.poll()
    got.core.publish(first)
    got.settle()
    assert got.envoy.versions() == wanted(first)


def test_a_b_a_when_b_is_rejected_after_a_was_asked_for_again() -> None:
    first, second = simple({A: 9_000, B: 1_000}), simple({A: 8_000, B: 2_000})
    bad = second.of(names.ROUTE)["ingress"].version
    got = link(first, FakeEnvoy(reject=lambda _t, _n, version: "no" if version == bad else None))
    got.core.publish(second)
    got.poll()
    got.core.publish(first)
    got.settle_through_time()
    assert got.envoy.versions() == wanted(first)
    assert got.core.state().applied


# --- subscriptions ---


def test_a_stale_nonce_does_not_lose_subscription_changes() -> None:
    got = link(simple({A: 10_000}, extra=[endpoints(B)]))
    answer = got.core.request(Request(names.ENDPOINT, (B,), nonce="1"), 0.0)
    assert answer.kind is Heard.STALE
    (push,) = got.core.poll(0.0)
    assert [r.name for r in push.upserts] == [B]


def test_a_stale_nack_rejects_nothing() -> None:
    got = link(simple({A: 9_000, B: 1_000}))
    got.core.publish(simple({A: 8_000, B: 2_000}))
    (push,) = got.core.poll(0.0)
    assert got.core.request(Request(names.ROUTE, nonce="1", error="old news"), 0.0).kind is Heard.STALE
    ack(got.core, push)
    assert got.core.state().applied


def test_resubscription_is_answered_even_when_unchanged() -> None:
    got = link(simple({A: 10_000}))
    ask(got.core, names.ENDPOINT, A)
    (push,) = got.core.poll(0.0)
    assert [r.name for r in push.upserts] == [A]


def test_unknown_names_are_answered_as_removed_and_remembered() -> None:
    got = link(simple({A: 10_000}))
    ask(got.core, names.ENDPOINT, B)
    (push,) = got.core.poll(0.0)
    assert (push.upserts, push.removed) == ((), (B,))
    ack(got.core, push)
    assert got.core.poll(0.0) == ()
    got.core.publish(simple({A: 10_000}, extra=[endpoints(B)]))
    (push,) = got.core.poll(0.0)
    assert [r.name for r in push.upserts] == [B]


def test_empty_names_mean_all_only_on_the_first_request_of_a_type() -> None:
    core = DeltaStream("p", 0.0)
    core.publish(gather([cluster(A), cluster(B), endpoints(A), endpoints(B)]))
    ask(core, names.CLUSTER, A)
    (push,) = core.poll(0.0)
    assert [r.name for r in push.upserts] == [A]
    ack(core, push)
    ask(core, names.CLUSTER)
    assert core.poll(0.0) == ()
    core.request(Request(names.CLUSTER, unsubscribe=(A,)), 0.0)
    core.publish(gather([cluster(A, 2), cluster(B, 2)]))
    assert core.poll(0.0) == ()


def test_named_types_have_no_wildcard_by_silence() -> None:
    core = DeltaStream("p", 0.0)
    core.publish(simple({A: 10_000}))
    ask(core, names.CLUSTER)
    ask(core, names.ENDPOINT)
    assert types(core.poll(0.0)) == [names.CLUSTER]


def test_explicit_wildcard_and_a_name_let_go_of_under_it() -> None:
    core = DeltaStream("p", 0.0)
    core.publish(gather([cluster(A)]))
    ask(core, names.CLUSTER, "*", A, B)
    (push,) = core.poll(0.0)
    assert ([r.name for r in push.upserts], push.removed) == ([A], ())
    ack(core, push)
    (push,) = core.poll(0.0)
    assert push.removed == (B,)
    ack(core, push)
    core.request(Request(names.CLUSTER, unsubscribe=(A,)), 0.0)
    (push,) = core.poll(0.0)
    assert [r.name for r in push.upserts] == [A]
    ack(core, push)
    core.request(Request(names.CLUSTER, unsubscribe=("*",)), 0.0)
    core.publish(gather([cluster(A, 2)]))
    assert core.poll(0.0) == ()


def test_a_name_left_while_its_push_was_under_way_is_sent_anew_when_asked_for_again() -> None:
    core = DeltaStream("p", 0.0)
    core.publish(simple({A: 10_000}))
    ask(core, names.CLUSTER)
    (cds,) = core.poll(0.0)
    ack(core, cds)
    ask(core, names.ENDPOINT, A)
    (push,) = core.poll(0.0)
    core.request(Request(names.ENDPOINT, unsubscribe=(A,)), 0.0)
    ack(core, push)
    ask(core, names.ENDPOINT, A)
    (push,) = core.poll(0.0)
    assert [r.name for r in push.upserts] == [A]


# --- CDS and EDS ---


def test_a_changed_cluster_gets_its_unchanged_endpoints_again() -> None:
    """Otherwise it warms until initial_fetch_timeout (go-control-plane#1035, consul#10379)."""
    got = link(simple({A: 9_000, B: 1_000}))
    got.core.publish(simple({A: 9_000, B: 1_000}, **{A: 2}))
    cds, eds = got.poll()
    assert [r.name for r in cds.upserts] == [A]
    assert (eds.type_url, [r.name for r in eds.upserts]) == (names.ENDPOINT, [A])
    got.settle()
    assert not got.envoy.warming
    assert got.core.state().applied


def test_endpoints_again_also_when_an_eds_push_was_in_flight() -> None:
    first = simple({A: 10_000})
    got = link(first)
    moved = gather([*(r for r in first if r.type_url != names.ENDPOINT), endpoints(A, port=9_001)])
    got.core.publish(moved)
    (eds,) = got.poll()
    got.core.publish(gather([*(r for r in moved if r.type_url != names.CLUSTER), cluster(A, 2)]))
    (cds,) = got.poll()
    assert (eds.type_url, cds.type_url) == (names.ENDPOINT, names.CLUSTER)
    got.settle()
    assert [kind for kind, _, _ in got.envoy.received[-3:]] == [names.ENDPOINT, names.CLUSTER, names.ENDPOINT]
    assert not got.envoy.warming


def test_new_cluster_is_ready_before_the_route_moves_to_it() -> None:
    """Fault 10 of table B: the fake raises if a route leads to a cluster that is not warm."""
    got = link(simple({A: 10_000}))
    got.core.publish(simple({B: 10_000}))
    assert types(got.poll()) == [names.CLUSTER]
    got.settle()
    assert got.envoy.versions() == wanted(simple({B: 10_000}))


def test_the_route_moves_before_its_old_cluster_goes() -> None:
    got = link(simple({A: 5_000, B: 5_000}))
    got.core.publish(simple({A: 10_000}))
    assert types(got.poll()) == [names.ROUTE]
    got.settle()
    assert got.envoy.versions() == wanted(simple({A: 10_000}))
    assert got.envoy.received[-1] == (names.CLUSTER, (), (B,))


def test_a_cluster_that_never_warms_holds_only_the_routes_to_it() -> None:
    got = link(simple({A: 6_000, B: 4_000}))
    got.envoy.auto_ack = False  # CDS is never answered
    extra = [cluster(C), endpoints(C)]
    got.core.publish(simple({A: 6_000, B: 4_000}, extra=extra))
    assert types(got.poll()) == [names.CLUSTER]
    got.core.publish(simple({A: 5_000, B: 5_000}, extra=extra))
    assert types(got.poll()) == [names.ROUTE]


def test_the_last_cluster_is_never_taken_away() -> None:
    """A sudden nothing is a fault of a read (consul#3975), so it is held and shown."""
    got = link(simple({A: 10_000}))
    got.core.publish(ResourceSet({}))
    got.settle_through_time()
    assert A in got.envoy.versions()[names.CLUSTER]
    assert "refused" in (got.core.state().types[names.CLUSTER].held or "")


def test_endpoints_are_not_taken_away_under_a_living_cluster() -> None:
    got = link(simple({A: 10_000}))
    got.core.publish(gather([cluster(A), routes({A: 10_000}), listener()]))
    got.settle_through_time()
    assert A in got.envoy.versions()[names.ENDPOINT]


# --- reconnect ---


def again(old: MemoryLink, desired: ResourceSet, **how: object) -> MemoryLink:
    """The same Envoy on a new stream."""
    made = MemoryLink(old.envoy, DeltaStream("ingress", old.now), old.now)
    made.core.publish(desired)
    old.envoy.received.clear()
    made.send(old.envoy.connect(**how))  # type: ignore[arg-type]
    while made.to_server:
        made.serve_one()
        made.poll()
    made.settle()
    return made


def test_reconnect_with_equal_versions_sends_no_resource() -> None:
    desired = simple({A: 10_000})
    got = again(link(desired), desired)
    assert got.envoy.received == [(names.CLUSTER, (), ()), (names.LISTENER, (), ())]
    assert got.core.state().applied


def test_reconnect_sends_only_what_differs() -> None:
    got = again(link(simple({A: 9_000, B: 1_000})), simple({A: 8_000, B: 2_000}))
    assert [entry for entry in got.envoy.received if entry[1] or entry[2]] == [
        (names.ROUTE, ("ingress",), ())
    ]


def test_reconnect_with_eds_before_cds_is_answered_and_answered_again() -> None:
    """istio#39937: the early answer is taken for the old cluster, the new one warms for ever."""
    desired = simple({A: 10_000})
    got = again(link(desired), desired, order=(names.ENDPOINT, names.CLUSTER, names.LISTENER, names.ROUTE))
    kinds = [(kind, up) for kind, up, _ in got.envoy.received]
    assert kinds[0] == (names.ENDPOINT, (A,))
    assert kinds.index((names.CLUSTER, ())) < len(kinds) - 1
    assert kinds[1:].count((names.ENDPOINT, (A,))) == 1


def test_reconnect_in_the_middle_of_warming_ends_warm() -> None:
    first, second = simple({A: 10_000}), simple({A: 10_000}, **{A: 2})
    got = link(first)
    got.core.publish(second)
    got.poll()
    got.take_one()  # CDS arrived, the endpoints did not
    assert got.envoy.warming
    got = again(got, second)
    assert not got.envoy.warming
    assert got.core.state().applied


def test_clusters_of_an_earlier_stream_go_only_after_the_routes() -> None:
    got = link(simple({A: 5_000, B: 5_000}))
    got = again(got, simple({A: 10_000}))
    assert got.envoy.versions() == wanted(simple({A: 10_000}))


def test_clusters_stay_while_it_is_not_known_whether_routes_will_be_asked_for() -> None:
    got = link(simple({A: 5_000, B: 5_000}))
    got = again(got, simple({A: 10_000}), without=(names.ROUTE,))
    assert B in got.envoy.versions()[names.CLUSTER]
    assert got.core.wake_at == got.core.opened + SETTLE_S


def test_a_stream_without_cds_is_closed_in_time() -> None:
    """envoy#34334: after a NACKed cluster and a reconnect CDS is never asked for again."""
    desired = simple({A: 10_000})
    got = again(link(desired), desired, without=(names.CLUSTER,))
    assert got.core.verdict(CDS_WITHIN_S - 0.1) is None
    assert "34334" in (got.core.verdict(CDS_WITHIN_S) or "")
    assert got.core.judged_at == CDS_WITHIN_S
    ask(got.core, names.CLUSTER)
    assert got.core.verdict(CDS_WITHIN_S) is None


# --- what is shown ---


def test_state_tells_desired_sent_and_acked() -> None:
    got = link(simple({A: 9_000, B: 1_000}))
    before = got.core.state().types[names.ROUTE]
    got.core.publish(simple({A: 8_000, B: 2_000}))
    got.now = 5.0
    got.poll()
    state = got.core.state(offset=1_000.0).types[names.ROUTE]
    assert state.acked == before.desired != state.desired
    assert state.sent == state.desired
    assert (state.pending_nonce is not None, state.pending_since) == (True, 1_005.0)
    assert not state.applied
    got.settle()
    assert got.core.state().types[names.ROUTE].applied


def test_unknown_types_are_answered_so_that_nobody_waits() -> None:
    core = DeltaStream("p", 0.0)
    core.publish(simple({A: 10_000}))
    ask(core, names.TYPE + "envoy.service.runtime.v3.Runtime", "flags")
    (push,) = core.poll(0.0)
    assert push.removed == ("flags",)


def test_the_order_table_lists_each_type_and_removes_last() -> None:
    kinds = [step.type_url for step in order.PUSH_ORDER]
    assert set(kinds) == set(ALL)
    assert kinds[-2:] == [names.CLUSTER, names.ENDPOINT]
    assert all(step.what is order.What.REMOVE for step in order.PUSH_ORDER[-2:])
    assert all(step.why for step in order.PUSH_ORDER)
