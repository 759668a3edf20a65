"""Whether a service keeps up with a drill's load while nothing is broken yet.

Law: pure. Times are unix seconds. It is about the service, not about the mesh: one that doesn't keep up would
fail every drill, for a reason that is no fault of the mesh. Requests that were due and have no answer count,
since a service that drowns has answered few, and those well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from drills.history import Request
from drills.model import Fitted

GROWTH = 0.1
"""Share of the load that may pile up in the later half without anybody calling it drowning."""
FEW = 5
"""So many unanswered requests more or fewer are chance."""
TOO_MANY = 429


@dataclass(frozen=True, slots=True)
class Strain:
    """What was seen: in `seconds` of `rate` requests per second `due` ones should have gone out; `good` were
    answered, `refused` got 429.
    """

    rate: float
    seconds: float
    due: int
    good: int
    refused: int

    @property
    def why(self) -> str:
        told = f"in {self.seconds:.0f} s {self.due} requests were due and {self.good} answered"
        each = f" ({self.good / self.seconds:.1f} a second)" if self.seconds > 0 else ""
        refused = f", {self.refused} refused as too many (429)" if self.refused else ""
        return f"the service doesn't bear it, with nothing broken: {told}{each}{refused}"

    def way_out(self, fitted: Fitted | None) -> str:
        """fitted: of the scenario; its row is wrong if the rate was taken from there."""
        half = self.good / self.seconds / 2 if self.seconds > 0 else 0.0
        lower = f"--rate {half:.1g} (half of what it answered)" if half >= 0.1 else "a lower --rate"
        row = "no rate at all (then capacity_rps of the service's row decides)"
        if fitted is not None and self.rate < fitted.wanted:
            row = f"put it right where it comes from ({fitted.row})"
        return f"{lower}, or {row}, or shorter answers (--set tokens=N), or more instances"


def drowning(requests: Sequence[Request], rate: float, start_s: float, now_s: float) -> Strain | None:
    """None when the service keeps up with `rate` requests per second sent since `start_s`.

    It doesn't when half of all that was due has no answer, or when what has none goes on growing.
    """
    unanswered = _due(rate, start_s, now_s) - _ended(requests, now_s)
    middle = (start_s + now_s) / 2
    growth = unanswered - (_due(rate, start_s, middle) - _ended(requests, middle))
    slow = unanswered > max(FEW, _due(rate, start_s, now_s) / 2)
    slower = growth > max(FEW, GROWTH * rate * (now_s - middle))
    return seen(requests, rate, start_s, now_s) if slow or slower else None


def refusing(requests: Sequence[Request], rate: float, start_s: float, now_s: float) -> Strain | None:
    """None unless requests were refused because there are too many."""
    found = seen(requests, rate, start_s, now_s)
    return found if found.refused else None


def seen(requests: Sequence[Request], rate: float, start_s: float, now_s: float) -> Strain:
    good = sum(r.ok for r in requests)
    refused = sum(r.status == TOO_MANY for r in requests)
    return Strain(rate, now_s - start_s, _due(rate, start_s, now_s), good, refused)


def _due(rate: float, start_s: float, at_s: float) -> int:
    return int((at_s - start_s) * rate) + 1


def _ended(requests: Sequence[Request], at_s: float) -> int:
    return sum(r.due_s + r.latency_s <= at_s for r in requests)
