"""Dye: observed against intended shares, only where the intention is certain."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from drills import checks
from drills.dye import dye
from drills.history import Event, History, Mark, Request, StatusSeen, Times
from drills.model import Action, Expect, Expectation, Load, Scenario, Verdict

T0 = 1_800_000_000.0
EVEN = {("a", "stable"): 0.45, ("a", "canary"): 0.05, ("b", "stable"): 0.45, ("b", "canary"): 0.05}
ALONE = {("b", "stable"): 0.9, ("b", "canary"): 0.1}


def plan(at: float, shares: dict[tuple[str, str], float], *, applied: bool = True) -> StatusSeen:
    times = Times(T0 + at, T0 + at, T0 + at, T0 + at if applied else 0.0)
    return StatusSeen(T0 + at, "b", shares, applied, times=times)


def load(start: float, end: float, shares: dict[tuple[str, str], float], rate: float = 200) -> list[Request]:
    """Requests that follow the shares exactly, in a shuffled order."""
    count = round((end - start) * rate)
    made = [pair for pair, share in shares.items() for _ in range(round(share * count))]
    Random(1).shuffle(made)
    return [
        Request(T0 + start + n / rate, T0 + start + n / rate, 0.01, True, 200, "b", region, stage)
        for n, (region, stage) in enumerate(made)
    ]


def judged(history: History, limit: float = 0.02) -> tuple[Verdict, float | None, str]:
    expectation = Expectation(Expect.DYE_DEVIATION, limit)
    drill = Scenario("d", "t", "x", "chat", "a", (), Load(), (Action("kill-region"),), (expectation,))
    (found,) = checks.judge(history, drill)
    return found.verdict, found.got, found.reason


def test_exact_shares_deviate_by_nothing() -> None:
    history = History("a", tuple(load(1, 11, EVEN)), (), (plan(0, EVEN),))
    found = dye(history)
    assert found.pooled is not None
    assert found.pooled.deviation == pytest.approx(0, abs=1e-3)
    assert judged(history)[0] is Verdict.PASS


def test_a_share_that_is_off_fails_and_is_named() -> None:
    skewed = {("a", "stable"): 0.55, ("a", "canary"): 0.05, ("b", "stable"): 0.35, ("b", "canary"): 0.05}
    verdict, got, reason = judged(History("a", tuple(load(1, 11, skewed)), (), (plan(0, EVEN),)))
    assert verdict is Verdict.FAIL
    assert got == pytest.approx(0.1, abs=1e-3)
    assert reason.startswith("a: 60.0% of 2000")


def test_errors_of_two_windows_do_not_cancel_out() -> None:
    """Too much before and too little after must not look exact together."""
    more = {("a", "stable"): 0.6, ("b", "stable"): 0.4}
    less = {("a", "stable"): 0.4, ("b", "stable"): 0.6}
    half = {("a", "stable"): 0.5, ("b", "stable"): 0.5}
    other = {("a", "stable"): 0.49, ("b", "stable"): 0.51}
    requests = tuple(load(1, 11, more) + load(12, 22, less))
    history = History("a", requests, (), (plan(0, half), plan(11.2, other)))
    pooled = dye(history).pooled
    assert pooled is not None
    assert pooled.deviation < 0.02
    assert judged(history)[0] is Verdict.FAIL


def test_requests_near_a_change_belong_to_no_plan() -> None:
    wrong = load(10.0, 10.4, ALONE)
    history = History("a", tuple(load(1, 9.4, EVEN) + wrong), (), (plan(0, EVEN), plan(10.2, ALONE)))
    found = dye(history).pooled
    assert found is not None
    assert found.requests == len(load(1, 9.4, EVEN))


def test_from_the_fault_to_the_answer_nothing_is_counted() -> None:
    statuses = (plan(0, EVEN), plan(11.5, ALONE))
    events = (Event(T0, Mark.LOAD), Event(T0 + 10, Mark.INJECT), Event(T0 + 20, Mark.HEAL))
    lost = [replace(r, region="b") for r in load(10, 11.5, EVEN)]
    requests = tuple(load(1, 9.4, EVEN) + lost + load(12.1, 19, ALONE))
    verdict, got, _ = judged(History("a", requests, events, statuses))
    assert verdict is Verdict.PASS
    assert got == pytest.approx(0, abs=2e-3)


def test_a_plan_that_is_not_applied_is_no_intention() -> None:
    history = History("a", tuple(load(1, 11, EVEN)), (), (plan(0, EVEN, applied=False),))
    assert dye(history).pooled is None
    assert judged(history)[0] is Verdict.UNKNOWN


def test_too_few_requests_are_unknown_and_answers_without_dye_are_counted_apart() -> None:
    few = load(1, 4, EVEN)
    bare = [replace(r, region="", stage="") for r in load(4, 5, EVEN)]
    history = History("a", tuple(few + bare), (), (plan(0, EVEN),))
    verdict, got, reason = judged(history)
    assert verdict is Verdict.UNKNOWN
    assert got is not None
    assert reason == f"{len(few)} requests under a settled plan, 1000 needed"
    assert dye(history).undyed == len(bare)


def test_a_document_that_is_not_ours_is_refused() -> None:
    with pytest.raises(ValueError, match=r"architecture\.md"):
        StatusSeen.from_document({"slices": []}, 0.0)
    slices = [["a", "stable", 1], ["b", "stable", 3], ["a", "stable", 4]]
    seen = StatusSeen.from_document({"region": "a", "slices": slices}, 1.0)
    assert dict(seen.shares) == {("a", "stable"): 0.625, ("b", "stable"): 0.375}
    assert seen.canary is None
