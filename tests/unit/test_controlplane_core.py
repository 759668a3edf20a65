"""The control plane's pure parts: path verdicts, status documents, the writes between regions."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.consul.answers import TxnOp
from mesh.controlplane import carry, path, status
from mesh.controlplane.path import PathState
from mesh.model import TrafficPlan
from mesh.traffic.epochs import Record, Write
from mesh.traffic.plan import ConfigPage

PLAN = TrafficPlan(
    "chat", (), 0.15, "config/traffic/canary-weight", {"a": 1.0}, layout=((("a", "stable"), 10_000),)
)


def test_a_region_is_down_after_three_failures_and_up_after_three_answers_and_a_dwell() -> None:
    state = PathState()
    for i in range(2):
        state = path.step(state, False, float(i), "refused")
    assert state.up
    state = path.step(state, False, 2.0, "refused")
    assert (state.up, state.flaps, state.reason) == (False, 1, "refused")
    for i in range(3):
        state = path.step(state, True, 2.1 + i / 10)
    assert not state.up  # three answers, but the dwell isn't over
    state = path.step(state, True, 4.0)
    assert state.up


@given(st.lists(st.booleans(), max_size=60))
def test_a_path_never_flaps_faster_than_the_dwell(results: list[bool]) -> None:
    state, changes = PathState(), []
    for i, ok in enumerate(results):
        after = path.step(state, ok, i * 0.5)
        if after.up != state.up:
            changes.append((i * 0.5, after.up))
        state = after
    for (down_at, was_up), (up_at, is_up) in itertools.pairwise(changes):
        if not was_up and is_up:
            assert up_at - down_at >= path.DWELL_S


def view(acked: str, nack: str = "") -> status.ProxyView:
    return status.ProxyView("a-ingress", acked, nack)


def test_applied_means_every_connected_proxy_acknowledged() -> None:
    start = status.progress(status.Progress(), "v1", [view("v0"), view("v1")], status.Times(seen=1.0), 2.0)
    assert (start.applied, start.acknowledged, start.connected) == (False, 1, 2)
    assert len(start.behind) == 1
    done = status.progress(start, "v1", [view("v1"), view("v1")], status.Times(seen=9.0), 3.0)
    assert done.applied
    assert (done.times.seen, done.times.applied) == (1.0, 3.0)
    later = status.progress(done, "v1", [view("v1"), view("v1")], status.Times(), 7.0)
    assert later.times.applied == 3.0


def test_no_proxy_connected_is_not_applied_and_a_nack_says_who_and_why() -> None:
    assert not status.progress(status.Progress(), "v1", [], status.Times(), 1.0).applied
    refused = status.progress(status.Progress(), "v1", [view("v1", "bad route")], status.Times(), 1.0)
    assert not refused.applied
    assert status.document(PLAN, "a", refused, {})["nacks"] == [{"proxy": "a-ingress", "reason": "bad route"}]


def test_observed_shares_are_of_the_window_and_nothing_flowing_is_not_a_share() -> None:
    seen = status.Observed()
    assert seen.shares(0.0)["canary"] is None
    seen = seen.add(status.Load(1.0, {("a", "canary"): 50, ("b", "stable"): 50}, 1.0))
    seen = seen.add(status.Load(12.0, {("a", "canary"): 15, ("a", "stable"): 85}, 1.0))
    shares = seen.shares(12.0)
    assert (shares["canary"], shares["regions"], shares["requests"]) == (0.15, {"a": 1.0}, 100)


@pytest.mark.parametrize(("at", "counts"), [(4.0, False), (5.9, False), (6.0, True)])
def test_a_report_that_began_before_the_change_is_not_counted(at: float, counts: bool) -> None:
    """It is of old and new water, and would judge a weight by what went before it."""
    load = status.Load(at, {("a", "stable"): 9}, 1.0)
    assert status.Observed(since=5.0).add(load).loads == ((load,) if counts else ())


def test_the_layout_survives_the_document_and_garbage_gives_none() -> None:
    body = json.loads(json.dumps(status.document(PLAN, "a", status.Progress(), {})))
    assert status.layout_of(body) == PLAN.layout
    for garbage in (None, [], {}, {"layout": 3}, {"layout": [[1]]}, {"layout": [["a", "b", "x"]]}):
        assert status.layout_of(garbage) == ()


def test_a_claim_checks_the_key_and_an_adoption_writes_both_or_neither() -> None:
    key, record = "config/traffic/canary-weight", Record(3, "b", "0.2")
    claim = carry.operations(Write(key, record, 7, 0, True, ""))
    assert claim[0] == TxnOp.check_index(key, 7)
    assert claim[1].verb == "cas"
    adopt = carry.operations(Write(key, record, 0, 4, False, ""))
    assert [op.verb for op in adopt] == ["cas", "cas"]
    assert (adopt[0].key, adopt[0].value, adopt[0].index) == (key, b"0.2", 0)
    gone = carry.operations(Write(key, Record(4, "b", None), 9, 4, False, ""))
    assert gone[0] == TxnOp.delete_cas(key, 9)
    assert carry.operations(Write(key, Record(4, "b", None), 0, 4, False, ""))[0].verb == "check-not-exists"


def test_only_a_mesh_without_a_past_gets_its_marker_made() -> None:
    bare = ConfigPage(marker=False)
    assert carry.needs_marker(bare, {})
    assert not carry.needs_marker(bare, None)
    assert not carry.needs_marker(bare, {"config/traffic/canary-weight": Record(1, "a", "0.1")})
    assert not carry.needs_marker(ConfigPage(), {})
