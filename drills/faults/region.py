"""Faults of a whole region: killed, frozen.

Law: signals to the region's own processes only, found by the marks its supervisor gave them. The
supervisor goes first, so that it can't repair what is being broken.
"""

from __future__ import annotations

import signal

from drills.doors import Doors
from drills.faults.base import FaultSpec, Proof
from regions.cli.errors import Refused

DONE_WITHIN_S = 30.0
"""For a signal to work everywhere; far more than a busy machine takes."""
POLL_S = 0.02


def _require_running(spec: FaultSpec, doors: Doors) -> None:
    if not doors.regions.pids(spec.target):
        raise Refused(f"region {spec.target}", "none of its processes runs here", "start it with `weir up`")


class KillRegion:
    """SIGKILL to everything. The kernel takes the children with the supervisor (PDEATHSIG); we make sure."""

    def __init__(self, spec: FaultSpec, doors: Doors) -> None:
        self.spec, self._doors = spec, doors

    @property
    def by_hand(self) -> str:
        return f"weir region up {self.spec.target}"

    async def prepare(self) -> FaultSpec:
        _require_running(self.spec, self._doors)
        return self.spec

    async def inject(self) -> str:
        regions, clock = self._doors.regions, self._doors.clock
        pids = regions.pids(self.spec.target)
        regions.signal(pids, signal.SIGKILL)
        deadline = clock.monotonic() + DONE_WITHIN_S
        while left := regions.pids(self.spec.target):
            if clock.monotonic() > deadline:
                raise RuntimeError(f"processes {list(left)} of {self.spec.target} outlived SIGKILL")
            regions.signal(left, signal.SIGKILL)
            await clock.sleep(POLL_S)
        return f"{len(pids)} processes of {self.spec.target} killed"

    async def heal(self) -> str:
        await self._doors.regions.up(self.spec.target)
        return f"{self.spec.target} started again"

    async def proof(self) -> Proof:
        why = await self._doors.regions.not_ready(self.spec.target)
        running = len(self._doors.regions.pids(self.spec.target))
        return Proof(not why, why or f"{running} processes of {self.spec.target} run, all ready")


class FreezeRegion:
    """SIGSTOP to everything: connections stay open and nobody answers, the hardest failure to notice."""

    def __init__(self, spec: FaultSpec, doors: Doors) -> None:
        self.spec, self._doors = spec, doors

    @property
    def by_hand(self) -> str:
        pids = " ".join(str(p) for p in self._doors.regions.frozen(self.spec.target))
        return f"kill -CONT {pids}" if pids else f"weir status  # no process of {self.spec.target} is frozen"

    async def prepare(self) -> FaultSpec:
        _require_running(self.spec, self._doors)
        return self.spec

    async def inject(self) -> str:
        regions, clock, target = self._doors.regions, self._doors.clock, self.spec.target
        regions.signal(regions.pids(target), signal.SIGSTOP)
        # One that was being started meanwhile is caught by the next look. And a process stops only when it
        # gets a processor to stop on, which on a busy machine takes its time.
        deadline = clock.monotonic() + DONE_WITHIN_S
        while awake := tuple(sorted(set(regions.pids(target)) - set(regions.frozen(target)))):
            if clock.monotonic() > deadline:
                raise RuntimeError(f"processes {list(awake)} of {target} run on after SIGSTOP")
            regions.signal(awake, signal.SIGSTOP)
            await clock.sleep(POLL_S)
        return f"{len(regions.frozen(target))} processes of {target} frozen"

    async def heal(self) -> str:
        regions = self._doors.regions
        pids = regions.pids(self.spec.target)
        # Children first: the supervisor must not wake up to children that look dead.
        regions.signal(tuple(reversed(pids)), signal.SIGCONT)
        return f"{len(pids)} processes of {self.spec.target} let run again"

    async def proof(self) -> Proof:
        frozen = self._doors.regions.frozen(self.spec.target)
        if frozen:
            return Proof(False, f"processes {list(frozen)} are still frozen")
        why = await self._doors.regions.not_ready(self.spec.target)
        return Proof(not why, why or f"no process of {self.spec.target} is frozen, all are ready")
