"""What a run leaves behind for the judges and the report.

Law: pure values.
"""

from __future__ import annotations

from dataclasses import dataclass

from drills.history import History


@dataclass(frozen=True, slots=True)
class Finding:
    """A probe measured: the value (1/0 for yes/no, None = not measurable), whether it is tolerable, why."""

    probe: str
    value: float | None
    held: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Phase:
    """name, when it began and ended (unix seconds)."""

    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run leaves for the judges.

    healed: nothing was broken, or all of it is proven healed. problem: why the drill could not be carried
    out as written ("" when it was). by_hand: commands that undo what is left.
    """

    history: History
    healed: bool
    problem: str = ""
    interrupted: bool = False
    steady: tuple[Finding, ...] = ()
    done: tuple[str, ...] = ()
    proofs: tuple[str, ...] = ()
    by_hand: tuple[str, ...] = ()
    phases: tuple[Phase, ...] = ()
