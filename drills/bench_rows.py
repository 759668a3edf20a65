"""One measured figure beside its goal and its peer.

Law: pure. Whether a goal is met is computed from the value and the goal's text, never written by hand.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_OPERATORS = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt, "==": operator.eq}
_TERM = re.compile(r"(ratio )?(<=|>=|==|<|>) *([0-9]+(?:\.[0-9]+)?) *(\S.*)?")


class GoalError(ValueError):
    """A goal that can't be read, or is in another unit than the value; the message shows it."""


@dataclass(frozen=True, slots=True)
class Row:
    """value in `unit`; peer: what was measured beside it in the same run; goal: "" or as `meets` reads it.

    met: None when there is no goal. A failed bench has error set and value None.
    """

    bench: str
    metric: str
    value: float | None
    unit: str
    goal: str = ""
    peer: str = ""
    peer_value: float | None = None
    error: str = ""

    @property
    def ratio(self) -> float | None:
        if self.value is None or not self.peer_value:
            return None
        return self.value / self.peer_value

    @property
    def met(self) -> bool | None:
        if self.error:
            return False
        return None if not self.goal else meets(self.goal, self.value, self.ratio, self.unit)

    def as_json(self) -> dict[str, Any]:
        body: dict[str, Any] = {
            "bench": self.bench,
            "metric": self.metric,
            "value": self.value,
            "unit": self.unit,
        }
        body |= {"peer": self.peer, "peer_value": self.peer_value, "ratio": self.ratio}
        body |= {"goal": self.goal, "met": self.met}
        return body | {"error": self.error} if self.error else body


def meets(goal: str, value: float | None, ratio: float | None, unit: str = "") -> bool:
    """Whether the figure satisfies the goal: "<= 15 ms", "<= 15", "ratio <= 2" ("<= 2 x"), joined by " and ".

    A value or ratio that is missing, or NaN, meets nothing. Raises GoalError for a goal that can't be read or
    that names another unit than the value's.
    """
    # All of them are read, also behind one that isn't met: a typing error must not wait for a better figure.
    verdicts = [_meets_term(term.strip(), value, ratio, unit) for term in goal.split(" and ")]
    return all(verdicts)


def _meets_term(term: str, value: float | None, ratio: float | None, unit: str) -> bool:
    found = _TERM.fullmatch(term)
    if not found:
        raise GoalError(f"goal {term!r}: wanted something like '<= 15 ms' or 'ratio <= 2'")
    of_ratio = bool(found[1]) or found[4] == "x"
    if found[4] and found[4] != ("x" if of_ratio else unit):
        # 900 s would meet "<= 1000 ms" if numbers alone were compared.
        raise GoalError(f"goal {term!r} beside a figure in {unit or 'no unit'!r}")
    number = ratio if of_ratio else value
    return number is not None and bool(_OPERATORS[found[2]](number, float(found[3])))


def from_mapping(body: Mapping[str, Any]) -> Row:
    """A row as a bench file gives it; computed fields (ratio, met) are ignored and computed again.

    Raises GoalError for a goal that says nothing, TypeError for a row without bench, metric or unit.
    """
    names = ("bench", "metric", "value", "unit", "goal", "peer", "peer_value", "error")
    given = {name: body[name] for name in names if body.get(name) is not None}
    for name in ("value", "peer_value"):
        # NaN and infinity are no figures (the quantile of nothing), and JSON has no word for them.
        if name in given and not math.isfinite(given[name]):
            del given[name]
    row = Row(**{"value": None, **given})
    if row.goal:
        meets(row.goal, row.value, row.ratio, row.unit)
    return row
