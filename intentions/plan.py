"""From the intentions that are (have) to those that shall be (want): puts, deletes, and what stays.

Law: pure. A plan is a value: showing it, applying it to a set and carrying it to Consul all use the same one.
An intention is known by its (source, destination); action and description may change.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from intentions.model import Action, Intention


class PlanError(ValueError):
    """One side names the same pair twice, so that nobody could say which of the two counts."""


@dataclass(frozen=True, slots=True)
class Put:
    """Write `new`, in place of `old` (None: there was none)."""

    new: Intention
    old: Intention | None = None


@dataclass(frozen=True, slots=True)
class IntentionPlan:
    """What to do, each tuple sorted by destination and source."""

    puts: tuple[Put, ...] = ()
    deletes: tuple[Intention, ...] = ()
    unchanged: tuple[Intention, ...] = ()

    @property
    def changes(self) -> int:
        return len(self.puts) + len(self.deletes)

    def lines(self) -> tuple[str, ...]:
        """The diff for people: `+` new, `~` changed, `-` deleted; nothing for what stays."""
        rows = [(p.new, _put_line(p)) for p in self.puts]
        rows += [(gone, f"- {_arrow(gone)}: {gone.action.value}") for gone in self.deletes]
        return tuple(line for _, line in sorted(rows, key=lambda row: pair(row[0])))

    def summary(self) -> str:
        new = sum(1 for p in self.puts if p.old is None)
        changed, gone, same = len(self.puts) - new, len(self.deletes), len(self.unchanged)
        return f"{new} to add, {changed} to change, {gone} to delete, {same} unchanged"


def pair(intention: Intention) -> tuple[str, str]:
    """What an intention is known by: (destination, source)."""
    return intention.destination, intention.source


def plan(have: Iterable[Intention], want: Iterable[Intention]) -> IntentionPlan:
    """The changes that turn `have` into `want`. Raises PlanError when a side names a pair twice."""
    old, new = _by_pair("have", have), _by_pair("want", want)
    return IntentionPlan(
        puts=tuple(Put(new[key], old.get(key)) for key in sorted(new) if new[key] != old.get(key)),
        deletes=tuple(old[key] for key in sorted(old) if key not in new),
        unchanged=tuple(new[key] for key in sorted(new) if new[key] == old.get(key)),
    )


def apply(have: Iterable[Intention], change: IntentionPlan) -> tuple[Intention, ...]:
    """`have` after the plan, sorted by destination and source. What Consul's content must then be."""
    rows = _by_pair("have", have)
    for gone in change.deletes:
        rows.pop(pair(gone), None)
    for put in change.puts:
        rows[pair(put.new)] = put.new
    return tuple(rows[key] for key in sorted(rows))


def _by_pair(side: str, intentions: Iterable[Intention]) -> dict[tuple[str, str], Intention]:
    rows: dict[tuple[str, str], Intention] = {}
    for intention in intentions:
        if rows.setdefault(pair(intention), intention) != intention:
            raise PlanError(f"{side}: two intentions for {_arrow(intention)}")
    return rows


def _arrow(intention: Intention) -> str:
    return f"{intention.source} -> {intention.destination}"


def _put_line(put: Put) -> str:
    new, old = put.new, put.old
    if old is None:
        return f"+ {_arrow(new)}: {new.action.value}"
    changes = []
    if old.action is not new.action:
        widens = " (opens access)" if new.action is Action.ALLOW else ""
        changes.append(f"{old.action.value} => {new.action.value}{widens}")
    if old.description != new.description:
        changes.append(f"description {old.description!r} => {new.description!r}")
    return f"~ {_arrow(new)}: {', '.join(changes)}"
