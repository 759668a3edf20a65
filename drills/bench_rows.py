"""One measured figure beside its goal and its peer.

Law: pure. Whether a goal is met is computed from the value and the goal's text, never written by hand.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_OPERATORS = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt, "==": operator.eq}
_GOAL = re.compile(r"(ratio )?(<=|>=|==|<|>) *([0-9.]+)")


class GoalError(ValueError):
    """A goal that can't be read; the message shows it."""


@dataclass(frozen=True, slots=True)
class Row:
    """value in `unit`; peer: what was measured beside it in the same run. goal: "<= 15", "ratio <= 2", or "".

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
        return None if not self.goal else meets(self.goal, self.value, self.ratio)

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


def meets(goal: str, value: float | None, ratio: float | None) -> bool:
    """Whether the figure satisfies the goal. A value or ratio that is missing meets nothing."""
    found = _GOAL.match(goal)
    if not found:
        raise GoalError(f"goal {goal!r}: wanted something like '<= 15' or 'ratio <= 2'")
    number = ratio if found[1] else value
    return number is not None and bool(_OPERATORS[found[2]](number, float(found[3])))


def from_mapping(body: Mapping[str, Any]) -> Row:
    """A row as a bench file gives it; computed fields (ratio, met) are ignored and computed again."""
    names = ("bench", "metric", "value", "unit", "goal", "peer", "peer_value", "error")
    given = {name: body[name] for name in names if body.get(name) is not None}
    return Row(**{"value": None, **given})
