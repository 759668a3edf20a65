"""What a verb did, step by step and timed: so that a person sees where the time went and where it failed.

Law: values and a stopwatch; the clock is handed in. Seconds are monotonic.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from mesh.clock import Clock


@dataclass(frozen=True, slots=True)
class Step:
    """note: what came of it, or why it failed."""

    name: str
    seconds: float
    note: str = ""
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a verb ended with. code: machine-readable reason of the failure, "" when it did what was asked.
    state: of the instance at its end. recovered: why the straight way failed where another one worked.
    """

    verb: str
    state: str
    code: str = ""
    error: str = ""
    recovered: str = ""
    seconds: float = 0.0
    steps: tuple[Step, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.code


class Trouble(RuntimeError):
    """A verb can't go on; nothing is broken by it. code: as in Outcome."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(slots=True)
class Stopwatch:
    """`with watch.step("drain") as notes: ...; notes.append("3 requests ended")`."""

    clock: Clock
    steps: list[Step] = field(default_factory=list)
    began: float = 0.0
    recovered: str = ""

    def __post_init__(self) -> None:
        self.began = self.clock.monotonic()

    @contextmanager
    def step(self, name: str) -> Iterator[list[str]]:
        """Times the block. What is appended to the list becomes the note; an error is noted and goes on."""
        started, notes = self.clock.monotonic(), list[str]()
        try:
            yield notes
        except BaseException as error:
            took = self.clock.monotonic() - started
            self.steps.append(Step(name, took, str(error) or type(error).__name__, failed=True))
            raise
        self.steps.append(Step(name, self.clock.monotonic() - started, "; ".join(notes)))

    def outcome(self, verb: str, state: str, code: str = "", error: str = "") -> Outcome:
        took = self.clock.monotonic() - self.began
        return Outcome(verb, state, code, error, self.recovered, took, tuple(self.steps))
