"""A change of traffic: what safety rules refuse, what a proposal shows, when it has arrived."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.consul import keys
from mesh.model import CANARY, STABLE, ServiceSpec
from mesh.traffic import outcome, proposal, safety
from mesh.traffic.proposal import Change
from mesh.traffic.safety import Outlook

SPEC = ServiceSpec("chat", "/chat", capacity_rps=100)
ALL = {(r, s): 2 for r in ("a", "b") for s in (STABLE, CANARY)}
NOW = Outlook(SPEC, ALL, {"a": 0.5, "b": 0.5}, (), 0.1, rps=300.0)


def test_the_last_region_is_not_evacuated() -> None:
    then = replace(NOW, evacuated=("a", "b"))
    assert "the last one can't be evacuated" in safety.judge(NOW, then)[0]


def test_no_shift_to_a_region_without_healthy_instances() -> None:
    now = replace(NOW, healthy={**ALL, ("b", STABLE): 0})
    (reason,) = safety.judge(now, replace(now, shares={"a": 0.4, "b": 0.6}))
    assert "b would get more traffic but has no healthy stable instance" in reason
    assert safety.judge(now, replace(now, shares={"a": 0.9, "b": 0.1})) == ()


def test_no_shift_past_the_declared_capacity_and_evacuation_counts_as_a_shift() -> None:
    assert safety.judge(NOW, replace(NOW, evacuated=("a",))) == ()  # 300 of 400
    busy = replace(NOW, rps=500.0)
    (reason,) = safety.judge(busy, replace(busy, evacuated=("a",)))
    assert "b would get 500 requests/s and is declared for 400" in reason


def test_capacity_is_not_judged_when_nothing_was_measured() -> None:
    unknown = replace(NOW, rps=None)
    assert safety.judge(unknown, replace(unknown, evacuated=("a",))) == ()


def test_a_canary_weight_needs_a_canary() -> None:
    none = replace(NOW, healthy={("a", STABLE): 1, ("b", STABLE): 1}, rps=None)
    assert (
        "no region that takes traffic has a healthy canary"
        in safety.judge(none, replace(none, canary=0.5))[0]
    )
    assert safety.judge(none, replace(none, canary=0.0)) == ()


@given(st.dictionaries(st.sampled_from("abc"), st.floats(0, 1)), st.sets(st.sampled_from("abc")))
def test_what_takes_traffic_adds_up_or_is_nobody(shares: dict[str, float], out: set[str]) -> None:
    taking = safety.taking(replace(NOW, shares=shares, evacuated=tuple(out)))
    assert not taking or sum(taking.values()) == pytest.approx(1.0)
    assert not set(taking) & out


def test_a_proposal_shows_the_write_and_its_effect_and_the_audit_entry_can_undo_it() -> None:
    wanted = proposal.evacuated(NOW, (None, 0), ("a",))
    assert (wanted.key, wanted.before, wanted.after) == (keys.evacuated("chat"), None, '["a"]')
    assert wanted.effect["b"] == (0.5, 1.0)
    assert wanted.changes
    body = proposal.audit_body(wanted, Change("me@host", "why", True), "a", "20260101T000000Z", "ff")
    assert json.loads(json.dumps(body))["before"] is None
    assert body["forced"] is False  # force was given, but nothing had to be overruled


def test_restoring_the_last_evacuated_region_deletes_the_key() -> None:
    out = replace(NOW, evacuated=("a",))
    assert proposal.evacuated(out, ('["a"]', 7), ()).after is None


def document(**changed: object) -> dict[str, object]:
    body: dict[str, object] = {
        "canary_weight": {"value": 0.1, "key": keys.DEFAULT_CANARY},
        "regions": {"a": 0.5, "b": 0.5},
        "evacuated": [],
        "connected": 1,
        "acknowledged": 1,
        "applied": True,
        "refusals": [],
        "nacks": [],
        "observed": {"canary": 0.1, "regions": {"a": 0.5, "b": 0.5}, "requests": 1000},
    }
    return {**body, **changed}


BOTH = ("a", "b")


def judged(a: object, b: object) -> outcome.Outcome:
    documents = {name: body for name, body in (("a", a), ("b", b)) if body is not None}
    return outcome.judge(NOW, documents, BOTH, 0.02)


def test_arrived_means_applied_in_every_region_and_observed() -> None:
    seen = judged(document(), document())
    assert (seen.applied, seen.observed, seen.share, seen.requests) == (True, True, pytest.approx(0.1), 2000)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (None, "no status document"),
        (document(canary_weight={"value": 0.2, "key": "k"}), "still on the values before"),
        (document(acknowledged=0), "0 of 1 proxies acknowledged"),
        (document(acknowledged=0, behind=["a-ingress"]), "0 of 1 proxies acknowledged; not yet: a-ingress"),
        (document(connected=0, acknowledged=0), "no ingress proxy is connected"),
        (document(nacks=[{"proxy": "b-ingress", "reason": "bad"}]), "b-ingress refused: bad"),
        (
            document(
                canary_weight={"value": 0, "key": "k"}, refusals=[{"key": "k", "reason": "not a number"}]
            ),
            "k: not a number",
        ),
    ],
)
def test_what_has_not_arrived_names_who_and_why(body: object, why: str) -> None:
    seen = judged(document(), body)
    assert not seen.applied
    assert why in seen.details["b"]


def test_no_traffic_is_neither_observed_nor_a_failure() -> None:
    still = document(observed={"canary": None, "regions": {}, "requests": 0})
    seen = judged(still, still)
    assert (seen.applied, seen.observed) == (True, None)


def test_a_share_that_is_off_is_named_with_its_tolerance() -> None:
    off = document(observed={"canary": 0.4, "regions": {"a": 0.5, "b": 0.5}, "requests": 5000})
    seen = judged(off, off)
    assert seen.observed is False
    assert "observed 0.400, wanted 0.100" in seen.details["canary"]
