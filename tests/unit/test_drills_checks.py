"""Judges: what passes, what fails, what stays unknown; properties that no record may break."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drills import checks
from drills.history import Event, History, Mark, Request, StatusSeen, Times
from drills.measure import (
    GOOD,
    buckets,
    longest_gap_s,
    percentile,
    reaction,
    recovery_s,
    success_rate,
)
from drills.model import (
    Action,
    Expect,
    Expectation,
    Judgement,
    Load,
    Scenario,
    Tolerance,
    Verdict,
    worst,
)

T0 = 1_800_000_000.0
RATE = 100.0
SHARES = {("a", "stable"): 0.5, ("b", "stable"): 0.5}


def scenario(*expectations: Expectation) -> Scenario:
    return Scenario(
        "drill", "title", "text", "chat", "a", (), Load(rate=RATE), (Action("kill-region"),), expectations
    )


def request(at: float, *, ok: bool = True, region: str = "b", **more: object) -> Request:
    base = Request(T0 + at, T0 + at, 0.01, ok, 200 if ok else 503, "b", region if ok else "", "stable")
    return replace(base, **more)  # type: ignore[arg-type]


def steady(start: float, end: float) -> list[Request]:
    """Load alternating between both regions."""
    count = round((end - start) * RATE)
    return [request(start + n / RATE, region="ab"[n % 2]) for n in range(count)]


def history(requests: list[Request], *, inject: float = 5.0, heal: float = 15.0, **more: object) -> History:
    events = (
        Event(T0, Mark.LOAD),
        Event(T0 + inject, Mark.INJECT),
        Event(T0 + heal, Mark.HEAL),
        Event(T0 + 20, Mark.END),
    )
    made = History("a", tuple(sorted(requests, key=lambda r: r.due_s)), events)
    return replace(made, **more)  # type: ignore[arg-type]


def judged(record: History, kind: Expect, limit: float) -> Judgement:
    (found,) = checks.judge(record, scenario(Expectation(kind, limit)))
    return found


@pytest.mark.parametrize("kind", list(Expect))
def test_no_traffic_is_unknown_for_every_expectation(kind: Expect) -> None:
    found = judged(history([]), kind, 0.5)
    assert found.verdict is Verdict.UNKNOWN
    assert found.got is None
    assert "no request" in found.reason


def test_every_expectation_has_a_judge() -> None:
    assert set(checks.CHECKS) == set(Expect)


def test_a_judge_that_crashes_is_unknown_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: object) -> checks.Answer:
        raise ZeroDivisionError("boom")

    monkeypatch.setattr(checks, "CHECKS", {Expect.FAILED: crash})
    found = judged(history(steady(0, 20)), Expect.FAILED, 0)
    assert found.verdict is Verdict.UNKNOWN
    assert "ZeroDivisionError: boom" in found.reason


def test_success_rate_counts_a_cut_stream_as_failed_and_tells_the_cause() -> None:
    load = steady(0, 20)
    load[700] = replace(load[700], ok=False, stream=True, cut=True)
    found = judged(history(load), Expect.SUCCESS_RATE, 0.9999)
    assert found.verdict is Verdict.FAIL
    assert found.got == pytest.approx(1 - 1 / 2000)
    assert found.reason == "1 of 2000 requests failed (1 × stream cut)"
    cut = judged(history(load), Expect.STREAMS_CUT, 0)
    assert (cut.got, cut.verdict) == (1, Verdict.FAIL)


def test_half_of_the_load_missing_is_no_pass() -> None:
    """A generator that died early must not make a drill green."""
    assert judged(history(steady(0, 9)), Expect.SUCCESS_RATE, 0.9).verdict is Verdict.UNKNOWN


def test_recovery_is_the_end_of_the_last_bad_bucket() -> None:
    load = [replace(r, ok=False) if 5.0 <= r.due_s - T0 < 6.25 else r for r in steady(0, 20)]
    found = judged(history(load), Expect.RECOVERY_S, 2)
    assert found.verdict is Verdict.PASS
    assert found.got == pytest.approx(1.3, abs=0.05)
    assert judged(history(load), Expect.RECOVERY_S, 1).verdict is Verdict.FAIL


def test_failures_up_to_the_healing_are_no_recovery() -> None:
    load = [replace(r, ok=False) if 5.0 <= r.due_s - T0 < 15 else r for r in steady(0, 20)]
    found = judged(history(load), Expect.RECOVERY_S, 2)
    assert (found.got, found.verdict) == (None, Verdict.FAIL)


def test_a_hole_in_the_load_hides_the_recovery() -> None:
    load = [r for r in steady(0, 20) if not 7 <= r.due_s - T0 < 9]
    assert judged(history(load), Expect.RECOVERY_S, 2).verdict is Verdict.UNKNOWN


def test_failures_after_the_healing_belong_to_the_rate_not_to_the_recovery() -> None:
    load = [replace(r, ok=False) if 16 <= r.due_s - T0 < 16.5 else r for r in steady(0, 20)]
    assert recovery_s(history(load)) == 0.0
    assert judged(history(load), Expect.FAILED, 0).verdict is Verdict.FAIL


def test_no_new_requests_needs_traffic_in_the_region_before() -> None:
    only_b = [request(n / RATE, region="b") for n in range(2000)]
    assert judged(history(only_b), Expect.NO_NEW_REQUESTS_AFTER_S, 1).verdict is Verdict.UNKNOWN


def test_no_new_requests_names_the_last_one() -> None:
    load = steady(0, 5) + [request(5 + n / RATE, region="b") for n in range(1500)]
    load += [request(5.4, region="a"), request(8.0, region="a")]
    found = judged(history(load), Expect.NO_NEW_REQUESTS_AFTER_S, 1)
    assert found.verdict is Verdict.FAIL
    assert found.got == pytest.approx(3.0)
    assert found.reason.startswith("1 requests served there later")
    calm = [r for r in load if r.sent_s != T0 + 8.0]
    assert judged(history(calm), Expect.NO_NEW_REQUESTS_AFTER_S, 1).verdict is Verdict.PASS


def test_next_change_counts_from_being_back_to_the_last_ack() -> None:
    base = history(steady(0, 20))
    back, change = Event(T0 + 16, Mark.BACK), Event(T0 + 16.2, Mark.CHANGE)
    done = Event(T0 + 17.5, Mark.CHANGED)
    whole = replace(base, events=(*base.events, back, change, done))
    found = judged(whole, Expect.NEXT_WEIGHT_CHANGE_S, 2)
    assert (found.got, found.verdict) == (pytest.approx(1.5), Verdict.PASS)
    never = replace(base, events=(*base.events, back, change))
    assert judged(never, Expect.NEXT_WEIGHT_CHANGE_S, 2).verdict is Verdict.FAIL
    untried = replace(base, events=(*base.events, back))
    assert judged(untried, Expect.NEXT_WEIGHT_CHANGE_S, 2).verdict is Verdict.UNKNOWN
    assert judged(base, Expect.NEXT_WEIGHT_CHANGE_S, 2).verdict is Verdict.UNKNOWN


def status(at: float, region: str, *, lost: bool, **times: float) -> StatusSeen:
    shares = {("b", "stable"): 1.0} if lost else SHARES
    return StatusSeen(T0 + at, region, shares, True, times=Times(**{k: T0 + v for k, v in times.items()}))


def test_reaction_is_that_of_the_slowest_region_and_adds_up() -> None:
    quick = status(5.6, "b", lost=True, seen=5.5, decided=5.51, pushed=5.52, applied=5.55)
    slow = status(6.1, "c", lost=True, seen=5.8, decided=5.9, pushed=5.95, applied=6.0)
    found = reaction(history(steady(0, 20), statuses=(status(0, "b", lost=False), quick, slow)))
    assert found is not None
    assert found.region == "c"
    assert found.detect_s == pytest.approx(0.8, abs=1e-5)
    assert found.decide_s == pytest.approx(0.1, abs=1e-5)
    assert found.push_s == pytest.approx(0.05, abs=1e-5)
    assert found.total_s == pytest.approx(1.0)


def test_the_lost_regions_own_opinion_is_no_reaction() -> None:
    """A region that is cut off believes that it is fine and the others are lost, or the other way round."""
    own = status(5.6, "a", lost=True, seen=5.5, decided=5.5, pushed=5.5, applied=5.5)
    assert reaction(history(steady(0, 20), statuses=(own,))) is None


def test_an_old_plan_without_the_region_is_no_reaction() -> None:
    old = status(0, "b", lost=True, seen=0, decided=0, pushed=0, applied=0.1)
    assert reaction(history(steady(0, 20), statuses=(old,))) is None


requests = st.lists(
    st.builds(
        request,
        st.floats(0, 20, allow_nan=False),
        ok=st.booleans(),
        region=st.sampled_from("ab"),
        stream=st.booleans(),
    ),
    max_size=60,
)


@settings(deadline=None, max_examples=50)
@given(requests, st.floats(0, 20))
def test_one_more_failure_never_raises_the_rate(load: list[Request], at: float) -> None:
    before, after = success_rate(load), success_rate([*load, request(at, ok=False)])
    assert after is not None
    assert before is None or after <= before
    assert 0 <= after < 1


@settings(deadline=None, max_examples=50)
@given(requests)
def test_buckets_lose_and_invent_nothing(load: list[Request]) -> None:
    found = buckets(load, 0.1)
    assert sum(b.requests for b in found) == len(load)
    assert sum(b.ok for b in found) == sum(r.ok for r in load)


@settings(deadline=None, max_examples=50)
@given(requests)
def test_whatever_was_recorded_every_judge_answers(load: list[Request]) -> None:
    for kind in Expect:
        found = judged(history(load), kind, 0.5)
        assert not found.reason.startswith("the checker itself failed")
        assert load or found.verdict is not Verdict.PASS


@settings(deadline=None, max_examples=50)
@given(requests, st.floats(0, 10))
def test_a_failure_under_the_fault_never_shortens_the_recovery(load: list[Request], at: float) -> None:
    before = recovery_s(history([*load, *steady(0, 20)]))
    after = recovery_s(history([*load, *steady(0, 20), request(5 + at, ok=False)]))
    assert after is None or (before is not None and after >= before)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.sampled_from(list(Verdict))))
def test_the_worst_verdict_wins_and_nothing_judged_is_unknown(found: list[Verdict]) -> None:
    result = worst(found)
    assert result is (Verdict.FAIL if Verdict.FAIL in found else result)
    assert (result is Verdict.PASS) == (bool(found) and set(found) == {Verdict.PASS})


def test_not_healed_is_a_failure_whatever_the_judges_say() -> None:
    fine = judged(history(steady(0, 20)), Expect.FAILED, 0)
    assert checks.verdict([fine], healed=True) is Verdict.PASS
    assert checks.verdict([fine], healed=False) is Verdict.FAIL


def test_small_numbers() -> None:
    assert percentile([], 0.5) is None
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([3.0, 1.0, 2.0], 0.99) == 3.0
    assert longest_gap_s([]) == float("inf")
    assert str(Tolerance(0.5, 1)) == "≥ 0.5 and ≤ 1"
    assert 0.99 < GOOD < 1
