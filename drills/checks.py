"""The judges: History and Scenario in, a Judgement per expectation out.

Law: pure. pass, fail or unknown, each with a reason in words. No traffic is unknown, a number the
record does not support is unknown, a judge that crashes is unknown: nothing passes by accident.
Rules live in the table CHECKS.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from drills.dye import dye
from drills.history import History, Mark, Request
from drills.measure import NoRecovery, fault_window, reaction, recovery, success_rate
from drills.model import Expect, Expectation, Judgement, Scenario, Verdict, worst

MIN_DYED = 1_000
"""Fewer counted requests say nothing about shares to a point."""

Answer = tuple[float | None, Verdict, str]
Check = Callable[[History, Scenario, float], Answer]


def judge(history: History, scenario: Scenario) -> tuple[Judgement, ...]:
    """Every expectation of the scenario, judged by itself, in the scenario's order."""
    return tuple(_judge_one(history, scenario, e) for e in scenario.expectations)


def verdict(judgements: Sequence[Judgement], *, healed: bool) -> Verdict:
    """The drill's answer: the worst judgement, and never better than FAIL when the world was not healed."""
    return Verdict.FAIL if not healed else worst(j.verdict for j in judgements)


def _judge_one(history: History, scenario: Scenario, expectation: Expectation) -> Judgement:
    name = expectation.kind.value
    try:
        if not history.requests:
            answer: Answer = (None, Verdict.UNKNOWN, "no request was sent: nothing was shown")
        else:
            answer = CHECKS[expectation.kind](history, scenario, expectation.limit)
    except Exception as error:
        # The one place where everything is caught: a judge's own bug must neither pass nor lose the report.
        answer = (None, Verdict.UNKNOWN, f"the checker itself failed: {type(error).__name__}: {error}")
    return Judgement(name, expectation.wanted, answer[0], answer[1], answer[2])


def _at_most(value: float, limit: float, good: str, bad: str) -> Answer:
    return (value, Verdict.PASS, good) if value <= limit else (value, Verdict.FAIL, bad)


def failures(requests: Sequence[Request]) -> dict[str, int]:
    """Why requests failed, most frequent first."""
    why: dict[str, int] = {}
    for request in requests:
        if not request.ok:
            reason = "stream cut" if request.cut else request.error or f"status {request.status}"
            why[reason] = why.get(reason, 0) + 1
    return dict(sorted(why.items(), key=lambda item: (-item[1], item[0])))


def _success(history: History, scenario: Scenario, limit: float) -> Answer:
    rate = success_rate(history.requests)
    if rate is None:
        return (None, Verdict.UNKNOWN, "no request was sent")
    expected = scenario.load.rate * _seconds(history)
    if len(history.requests) < expected / 2:
        reason = f"{len(history.requests)} requests were sent where about {expected:.0f} were due"
        return (rate, Verdict.FAIL if rate < limit else Verdict.UNKNOWN, reason)
    lost = len(history.requests) - sum(r.ok for r in history.requests)
    told = f"{lost} of {len(history.requests)} requests failed{_why(history.requests)}"
    return (rate, Verdict.PASS if rate >= limit else Verdict.FAIL, told)


def _seconds(history: History) -> float:
    start, end = history.first(Mark.LOAD), history.last(Mark.END)
    return end - start if start is not None and end is not None else 0.0


def _why(requests: Sequence[Request]) -> str:
    why = failures(requests)
    return " (" + ", ".join(f"{n} × {reason}" for reason, n in list(why.items())[:3]) + ")" if why else ""


def _failed(history: History, scenario: Scenario, limit: float) -> Answer:
    lost = sum(not r.ok for r in history.requests)
    return _at_most(lost, limit, f"of {len(history.requests)} requests", f"failed{_why(history.requests)}")


def _streams_cut(history: History, scenario: Scenario, limit: float) -> Answer:
    streams = sum(r.stream for r in history.requests)
    if not streams:
        return (None, Verdict.UNKNOWN, "no stream was sent")
    cut = sum(r.cut for r in history.requests)
    return _at_most(
        cut, limit, f"of {streams} streams", f"{cut} of {streams} streams ended before their last token"
    )


def _recovery(history: History, scenario: Scenario, limit: float) -> Answer:
    took = recovery(history)
    if isinstance(took, NoRecovery):
        return (None, Verdict.FAIL if took is NoRecovery.NEVER else Verdict.UNKNOWN, took.value)
    told = (
        "no failure after the injection" if took == 0 else f"the last bad 100 ms ended {took:.2f} s after it"
    )
    return _at_most(took, limit, told, told)


def _dye(history: History, scenario: Scenario, limit: float) -> Answer:
    found = dye(history)
    pooled = found.pooled
    if pooled is None or pooled.requests < MIN_DYED:
        counted = pooled.requests if pooled else 0
        why = f"{counted} requests under a settled plan, {MIN_DYED} needed"
        return (pooled.deviation if pooled else None, Verdict.UNKNOWN, why)
    told = (
        f"{pooled.where}: {pooled.observed:.1%} of {pooled.requests} requests, {pooled.intended:.1%} intended"
    )
    # A single window is shorter, so chance alone moves it more: it fails only beyond its noise.
    for window in found.windows:
        if window.deviation - window.noise > limit:
            told = (
                f"{window.where}: {window.observed:.1%} of {window.requests}, {window.intended:.1%} intended"
            )
            return (window.deviation, Verdict.FAIL, told)
    if limit < pooled.deviation <= pooled.noise:
        # So few requests deviate this much by chance alone; a drill that failed for it would cry wolf.
        return (pooled.deviation, Verdict.PASS, f"{told}; chance alone gives up to {pooled.noise:.1%}")
    return _at_most(pooled.deviation, limit, told, told)


def _no_new_requests(history: History, scenario: Scenario, limit: float) -> Answer:
    window = fault_window(history)
    if window is None:
        return (None, Verdict.UNKNOWN, "nothing was injected")
    start, end = window
    before = [r for r in history.requests if r.sent_s < start and r.region == history.target]
    during = [r for r in history.requests if start + limit <= r.sent_s < end]
    if not before or not during:
        return (
            None,
            Verdict.UNKNOWN,
            "no traffic in the region before, or none at all after: nothing to compare",
        )
    mine = [r.sent_s for r in history.requests if start <= r.sent_s < end and r.region == history.target]
    last = max(mine, default=start) - start
    late = sum(s >= start + limit for s in mine)
    told = f"the last request that {history.target} served was sent {last:.2f} s after the order"
    return _at_most(last, limit, told, f"{late} requests served there later; {told}")


def _next_change(history: History, scenario: Scenario, limit: float) -> Answer:
    back, changed = history.first(Mark.BACK), history.first(Mark.CHANGED)
    if back is None:
        return (None, Verdict.UNKNOWN, "what was taken away never came back, so no change was tried")
    if changed is None:
        tried = history.first(Mark.CHANGE) is not None
        why = "the weight change was never applied" if tried else "no weight change was tried"
        return (None, Verdict.FAIL if tried else Verdict.UNKNOWN, why)
    took = max(0.0, changed - back)
    return _at_most(
        took, limit, "from being back to the last ACK", "too long from being back to the last ACK"
    )


def _mttr(history: History, scenario: Scenario, limit: float) -> Answer:
    answer = reaction(history)
    if answer is None:
        return (None, Verdict.UNKNOWN, "no control plane published an answer")
    told = f"slowest: {answer.region}"
    return _at_most(answer.total_s, limit, told, told)


CHECKS: Mapping[Expect, Check] = {
    Expect.SUCCESS_RATE: _success,
    Expect.DYE_DEVIATION: _dye,
    Expect.RECOVERY_S: _recovery,
    Expect.FAILED: _failed,
    Expect.STREAMS_CUT: _streams_cut,
    Expect.NO_NEW_REQUESTS_AFTER_S: _no_new_requests,
    Expect.NEXT_WEIGHT_CHANGE_S: _next_change,
    Expect.MTTR_S: _mttr,
}
