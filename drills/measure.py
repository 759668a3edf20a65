"""Numbers out of a recorded History: rates, recovery, dye, the parts of the reaction.

Law: pure. A number that the record does not support is None, never zero: whoever judges then says
"unknown". Windows are half open, [start, end). Times are unix seconds, durations seconds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from drills.history import History, Mark, Request, StatusSeen

GOOD = 0.999
"""Success share from which a bucket counts as recovered."""

BUCKET_S = 0.1
GUARD_S = 0.5
"""Left out of dye windows on each side: a request on its way belongs to neither plan."""

MAX_GAP_S = 1.0
"""A longer hole in the load and the record no longer shows what clients would have seen."""


@dataclass(frozen=True, slots=True)
class Bucket:
    at_s: float
    requests: int
    ok: int

    @property
    def success(self) -> float | None:
        return self.ok / self.requests if self.requests else None


def success_rate(requests: Sequence[Request]) -> float | None:
    """Share of requests that were answered whole and right; None without any."""
    return sum(r.ok for r in requests) / len(requests) if requests else None


def buckets(requests: Iterable[Request], width_s: float) -> tuple[Bucket, ...]:
    """Requests by when they were due, in equal buckets without holes from the first to the last."""
    sent: Counter[int] = Counter()
    good: Counter[int] = Counter()
    for request in requests:
        slot = math.floor(request.due_s / width_s)
        sent[slot] += 1
        good[slot] += request.ok
    if not sent:
        return ()
    return tuple(Bucket(n * width_s, sent[n], good[n]) for n in range(min(sent), max(sent) + 1))


def between(requests: Iterable[Request], start_s: float, end_s: float) -> tuple[Request, ...]:
    """Requests due in [start, end)."""
    return tuple(r for r in requests if start_s <= r.due_s < end_s)


def longest_gap_s(requests: Sequence[Request]) -> float:
    """Longest time in which no request was sent; infinite without any two."""
    times = sorted(r.sent_s for r in requests)
    return max((b - a for a, b in pairwise(times)), default=math.inf)


def percentile(values: Sequence[float], share: float) -> float | None:
    """Nearest-rank percentile, `share` in (0, 1]; None without values."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def fault_window(history: History) -> tuple[float, float] | None:
    """From the injection to the beginning of the healing (or to the end of the record)."""
    start = history.first(Mark.INJECT)
    if start is None:
        return None
    end = history.first(Mark.HEAL) or max((r.due_s for r in history.requests), default=start)
    return (start, end)


class NoRecovery(StrEnum):
    """Why there is no recovery time."""

    NOTHING_INJECTED = "nothing was injected"
    LOAD_HOLE = "the load had a hole of more than a second under the fault"
    NEVER = "requests still failed in the last second before the healing"


def recovery(history: History, good: float = GOOD) -> float | NoRecovery:
    """Seconds from the injection until every bucket of 100 ms up to the healing is good; 0.0 if all are.

    At a few hundred requests per second one failure makes a bucket bad, so this is the moment of the
    last failure: strict on purpose. Without load that shows it, or without recovery, the reason.
    """
    window = fault_window(history)
    if window is None:
        return NoRecovery.NOTHING_INJECTED
    start, end = window
    seen = between(history.requests, start - BUCKET_S, end)
    if not seen or longest_gap_s(seen) > MAX_GAP_S or end - max(r.due_s for r in seen) > MAX_GAP_S:
        return NoRecovery.LOAD_HOLE
    bad = [b.at_s + BUCKET_S for b in buckets(seen, BUCKET_S) if b.success is not None and b.success < good]
    last = max(bad, default=start)
    return NoRecovery.NEVER if end - last < min(1.0, (end - start) / 2) else max(0.0, last - start)


def recovery_s(history: History) -> float | None:
    """`recovery` as a number, None when there is none."""
    found = recovery(history)
    return None if isinstance(found, NoRecovery) else found


def lag_s(requests: Sequence[Request]) -> float:
    """By how much the generator was late at worst. Much of it means: this machine was short of CPU."""
    return max((r.sent_s - r.due_s for r in requests), default=0.0)


@dataclass(frozen=True, slots=True)
class Reaction:
    """How the control planes answered: durations that add up to `total_s`, of the slowest region."""

    start_s: float
    region: str
    detect_s: float
    decide_s: float
    push_s: float
    applied_s: float

    @property
    def total_s(self) -> float:
        return self.detect_s + self.decide_s + self.push_s + self.applied_s


def reaction(history: History) -> Reaction | None:
    """From the cause to the last ACK of the plan that answers it, in the slowest region.

    The cause is the weight change made after a control-plane fault, if the drill made one, else the
    injection; the answer to the latter is the first applied plan that gives the target no share.
    None when no control plane answered.
    """
    change = history.first(Mark.CHANGE)
    cause = change if change is not None else history.first(Mark.INJECT)
    if cause is None:
        return None
    answers: dict[str, StatusSeen] = {}
    for status in history.statuses:
        fits = _new_canary(history, status, cause) if change is not None else _without_target(history, status)
        if fits and status.applied and status.times.applied >= cause and status.region not in answers:
            answers[status.region] = status
    if not answers:
        return None
    slowest = max(answers.values(), key=lambda s: s.times.applied)
    t = slowest.times
    seen = min(max(cause, t.seen), t.applied)
    decided = min(max(seen, t.decided), t.applied)
    pushed = min(max(decided, t.pushed), t.applied)
    return Reaction(cause, slowest.region, seen - cause, decided - seen, pushed - decided, t.applied - pushed)


def _without_target(history: History, status: StatusSeen) -> bool:
    """A plan without the target counts; the target's own only when it was told to go (evacuated)."""
    if not status.shares or any(region == history.target for region, _ in status.shares):
        return False
    return status.region != history.target or history.target in status.evacuated


def _new_canary(history: History, status: StatusSeen, cause: float) -> bool:
    before = [s.canary for s in history.statuses if s.region == status.region and s.at_s < cause]
    return status.at_s >= cause and (not before or status.canary != before[-1])


@dataclass(frozen=True, slots=True)
class DyeWindow:
    """Requests that one intended plan was in force for: how many, and where they went.

    deviation: largest |observed - intended| over regions, stages and pairs of both. where: the worst one.
    noise: three standard deviations of that share by chance alone.
    """

    requests: int
    deviation: float
    where: str
    intended: float
    observed: float

    @property
    def noise(self) -> float:
        p = min(max(self.intended, 1 / self.requests), 1 - 1 / self.requests) if self.requests > 1 else 0.5
        return 3 * math.sqrt(p * (1 - p) / max(1, self.requests))
