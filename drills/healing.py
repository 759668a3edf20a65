"""Healing: every fault undone, newest first, and each one proven by measuring.

Law: one fault that can't be healed never keeps another from being tried. Errors become words; nothing
is raised but cancellation. What is not proven when time is up is told as commands for a person.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from drills.faults.base import Fault, Proof
from mesh.clock import Clock

POLL_S = 0.05
AGAIN_S = 5.0
"""Healing is repeated after this long without proof: a region may have died a second time meanwhile."""


@dataclass(frozen=True, slots=True)
class Healing:
    """healed: all of it is proven. at_s: unix time of the last proof. by_hand: commands for what is left."""

    healed: bool = True
    at_s: float = 0.0
    proofs: tuple[str, ...] = ()
    by_hand: tuple[str, ...] = ()

    def then(self, later: Healing) -> Healing:
        """Both together."""
        return Healing(
            self.healed and later.healed,
            max(self.at_s, later.at_s),
            (*self.proofs, *later.proofs),
            (*self.by_hand, *later.by_hand),
        )

    def with_world(self, why_not: str) -> Healing:
        """With the check of the whole world added; "" means it is as it was."""
        told = f"not as before: {why_not}" if why_not else "all regions ready, every traffic plan as before"
        return replace(self, healed=self.healed and not why_not, proofs=(*self.proofs, told))


def abandoned(faults: Sequence[Fault]) -> Healing:
    """The person stopped the healing itself."""
    told = tuple(f"{f.spec.do} on {f.spec.target}: healing was stopped by hand" for f in faults)
    return Healing(False, 0.0, told, tuple(f.by_hand for f in faults))


async def heal(faults: Sequence[Fault], clock: Clock, limit_s: float, say: Callable[[str], None]) -> Healing:
    """Undo and prove all of them within `limit_s` seconds together."""
    deadline = clock.monotonic() + limit_s
    result = Healing()
    for fault in reversed(faults):
        result = result.then(await _heal_one(fault, clock, deadline, say))
    return result


async def _heal_one(fault: Fault, clock: Clock, deadline: float, say: Callable[[str], None]) -> Healing:
    told, again_at = "", 0.0
    while True:
        now = clock.monotonic()
        if now >= again_at:
            told = await _undo(fault)
            say(told)
            again_at = clock.monotonic() + AGAIN_S
        proof = await _measure(fault)
        if proof.healed:
            say(f"proven: {proof.detail}")
            return Healing(True, clock.time(), (f"{told}; {proof.detail}",))
        if clock.monotonic() >= deadline:
            why = f"{fault.spec.do} on {fault.spec.target} is not healed: {proof.detail} ({told})"
            return Healing(False, clock.time(), (why,), (fault.by_hand,))
        await clock.sleep(POLL_S)


async def _undo(fault: Fault) -> str:
    try:
        return await fault.heal()
    except Exception as error:
        # Caught whole: the other faults must still be healed, and this one is tried again.
        return f"{fault.spec.do} on {fault.spec.target}: healing failed: {error}"


async def _measure(fault: Fault) -> Proof:
    try:
        return await fault.proof()
    except Exception as error:
        # What can't be measured is not proven.
        return Proof(False, f"could not be measured: {error}")
