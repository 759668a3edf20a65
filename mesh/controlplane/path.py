"""Is the way to a region open? N of M with different thresholds, a dwell, and a flap counter.

Law: pure. The probes are somebody else's; here their results become a state that doesn't flap
(hashicorp/consul#9811: a region dies while its catalog still says healthy; TRAPS.md 4, pains 1 and 20).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

DOWN_AFTER = 3
"""Failed probes in a row until a region counts as down."""
UP_AFTER = 3
"""Good probes in a row until it counts as up again."""
DWELL_S = 2.0
"""Seconds that a region stays down at least, so that a flapping link doesn't move sessions twice a second."""


@dataclass(frozen=True, slots=True)
class PathState:
    """up: the verdict. run: results in a row that contradict it. since: monotonic seconds of the last change.

    known: whether any probe ever succeeded; a region that was never reached is not "lost".
    """

    up: bool = True
    run: int = 0
    since: float = 0.0
    flaps: int = 0
    known: bool = False
    reason: str = ""


def step(state: PathState, ok: bool, now: float, reason: str = "") -> PathState:
    """The state after one probe."""
    known = state.known or ok
    if ok == state.up:
        return replace(state, run=0, known=known, reason=state.reason if state.up else reason)
    run = state.run + 1
    if state.up and run >= DOWN_AFTER:
        return PathState(False, 0, now, state.flaps + 1, known, reason)
    if not state.up and run >= UP_AFTER and now - state.since >= DWELL_S:
        return PathState(True, 0, now, state.flaps, known)
    return replace(state, run=run, known=known, reason=reason or state.reason)
