"""The states of an instance and the ways between them.

Law: pure; one table, and nothing is done here. A change that the table doesn't have is an IllegalChange,
never a silent one. How a state looks to the mesh stands here too, so that Consul and /ready can't disagree.

    starting → running → draining → asleep → waking → running
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType


class State(StrEnum):
    """cold: asleep with its engine closed (asked for, the least recently used of too many sleepers, or one
    whose sleep gave no memory back). quarantined: it failed a check and takes no traffic until a cold start
    is verified. dead: the engine is broken for good."""

    STARTING = "starting"
    RUNNING = "running"
    DRAINING = "draining"
    ASLEEP = "asleep"
    WAKING = "waking"
    COLD = "cold"
    QUARANTINED = "quarantined"
    DEAD = "dead"


_S = State
CHANGES: Mapping[State, frozenset[State]] = MappingProxyType(
    {
        _S.STARTING: frozenset({_S.RUNNING, _S.DRAINING, _S.QUARANTINED, _S.DEAD}),
        _S.RUNNING: frozenset({_S.DRAINING, _S.DEAD}),
        # Back to running: what ran did not end in time, or the mesh could not be told.
        _S.DRAINING: frozenset({_S.ASLEEP, _S.COLD, _S.RUNNING, _S.QUARANTINED, _S.DEAD}),
        _S.ASLEEP: frozenset({_S.WAKING, _S.COLD, _S.QUARANTINED, _S.DEAD}),
        # Back to asleep: there is no room to wake into, and nothing was touched.
        _S.WAKING: frozenset({_S.RUNNING, _S.ASLEEP, _S.QUARANTINED, _S.DEAD}),
        _S.COLD: frozenset({_S.STARTING, _S.DEAD}),
        _S.QUARANTINED: frozenset({_S.STARTING, _S.COLD, _S.DEAD}),
        _S.DEAD: frozenset({_S.STARTING}),
    }
)

AS_REGISTERED: Mapping[State, str] = MappingProxyType(
    {
        _S.STARTING: "starting",
        _S.RUNNING: "ready",
        _S.DRAINING: "draining",
        _S.ASLEEP: "asleep",
        _S.WAKING: "waking",
        _S.COLD: "cold",
        _S.QUARANTINED: "quarantined",
        _S.DEAD: "quarantined",
    }
)
"""The meta value `lifecycle` in Consul. One that is dead is also told by its failing check."""


class IllegalChange(RuntimeError):
    """The table has no way from `was` to `wanted`, or the process is ending."""

    def __init__(self, was: State, wanted: State, why: str = "") -> None:
        self.was, self.wanted = was, wanted
        super().__init__(why or f"an instance that is {was} can't become {wanted}")


class Lifecycle:
    """Where one instance stands. why: reason of the last change where one was given.

    leaving: the process is ending (SIGTERM); from then on only DRAINING and DEAD may follow.
    """

    def __init__(self, state: State = State.STARTING) -> None:
        self.state, self.why, self.leaving = state, "", False

    def to(self, wanted: State, why: str = "") -> None:
        """Change the state. Raises IllegalChange and changes nothing."""
        if wanted not in CHANGES[self.state]:
            raise IllegalChange(self.state, wanted)
        if self.leaving and wanted not in (State.DRAINING, State.DEAD):
            raise IllegalChange(self.state, wanted, f"the process is ending; it can't become {wanted}")
        self.state, self.why = wanted, why

    def can(self, wanted: State) -> bool:
        ending = self.leaving and wanted not in (State.DRAINING, State.DEAD)
        return wanted in CHANGES[self.state] and not ending

    def leave(self) -> None:
        """The process is to end: drain where anything may run; one that sleeps has nothing to drain."""
        if self.can(State.DRAINING):
            self.to(State.DRAINING, "the process is ending")
        self.leaving = True

    def die(self, why: str) -> None:
        """Broken for good, from any state. The first reason stays."""
        if self.state is not State.DEAD:
            self.state, self.why = State.DEAD, why

    @property
    def dead(self) -> str:
        """Why it is dead, or empty."""
        return self.why if self.state is State.DEAD else ""

    def why_not_ready(self) -> str:
        """Why no new request should come, or empty."""
        if self.state is State.RUNNING:
            return "draining" if self.leaving else ""
        return self.dead or str(self.state)
