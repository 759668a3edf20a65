"""Faults of one process: killed and held down, or frozen.

Law: which process is decided in `prepare` and written into the spec, so that healing finds the same one.
"""

from __future__ import annotations

import signal
from dataclasses import replace

from drills.doors import Doors, ProcessSeen
from drills.faults.base import FaultSpec, Proof
from regions.cli.errors import Refused

EXECUTOR = "executor"
"""Stands for the first stable instance; any other value is a process name of the region."""


async def _named(spec: FaultSpec, doors: Doors) -> FaultSpec:
    """The spec with a real process name. Raises Refused when the region has none of that name."""
    wanted = str(spec.params.get("process", ""))
    processes = await doors.processes.status(spec.target)
    if wanted == EXECUTOR:
        stable = sorted(
            n for n in processes if n.startswith(f"{spec.service}-stable-") and "sidecar" not in n
        )
        wanted = stable[0] if stable else wanted
    if wanted not in processes:
        known = ", ".join(sorted(processes))
        raise Refused(
            f"process {wanted} of {spec.target}", "there is none of that name", f"known are {known}"
        )
    return replace(spec, params={**spec.params, "process": wanted})


async def _seen(spec: FaultSpec, doors: Doors) -> ProcessSeen | None:
    return (await doors.processes.status(spec.target)).get(str(spec.params["process"]))


def _proof(spec: FaultSpec, seen: ProcessSeen | None) -> Proof:
    name = f"{spec.params['process']} of {spec.target}"
    if seen is None or not seen.ready:
        return Proof(False, f"{name} is {seen.state if seen else 'unknown to its supervisor'}")
    return Proof(True, f"{name} runs with pid {seen.pid} and is ready")


class HoldProcess:
    """SIGKILL, and kept down until healed."""

    def __init__(self, spec: FaultSpec, doors: Doors) -> None:
        self.spec, self._doors = spec, doors

    @property
    def _name(self) -> str:
        return str(self.spec.params["process"])

    @property
    def by_hand(self) -> str:
        return f"weir region up {self.spec.target}  # lets {self._name} start again"

    async def prepare(self) -> FaultSpec:
        self.spec = await _named(self.spec, self._doors)
        return self.spec

    async def inject(self) -> str:
        await self._doors.processes.hold(self.spec.target, self._name)
        return f"{self._name} of {self.spec.target} killed and held down"

    async def heal(self) -> str:
        await self._doors.processes.release(self.spec.target, self._name)
        return f"{self._name} of {self.spec.target} let start again"

    async def proof(self) -> Proof:
        return _proof(self.spec, await _seen(self.spec, self._doors))


class FreezeProcess:
    """SIGSTOP: it keeps its ports and connections and does nothing."""

    def __init__(self, spec: FaultSpec, doors: Doors) -> None:
        self.spec, self._doors = spec, doors

    @property
    def by_hand(self) -> str:
        return f"kill -CONT {self.spec.params.get('pid', '')}".strip()

    async def prepare(self) -> FaultSpec:
        spec = await _named(self.spec, self._doors)
        seen = await _seen(spec, self._doors)
        if seen is None or seen.pid is None:
            raise Refused(
                f"process {spec.params['process']} of {spec.target}", "it doesn't run", "see `weir status`"
            )
        self.spec = replace(spec, params={**spec.params, "pid": float(seen.pid)})
        return self.spec

    async def inject(self) -> str:
        pid = int(self.spec.params["pid"])
        self._doors.regions.signal((pid,), signal.SIGSTOP)
        return f"{self.spec.params['process']} of {self.spec.target} (pid {pid}) frozen"

    async def heal(self) -> str:
        # By pid only while it is one of the region's: after a crash the number may belong to a stranger.
        # Whether it has stopped yet is not asked: on a busy machine that comes after the signal.
        pid = int(self.spec.params.get("pid", 0))
        mine = [p for p in self._doors.regions.pids(self.spec.target) if p == pid]
        self._doors.regions.signal(mine, signal.SIGCONT)
        return f"{self.spec.params.get('process', 'process')} of {self.spec.target} let run again"

    async def proof(self) -> Proof:
        if int(self.spec.params.get("pid", 0)) in self._doors.regions.frozen(self.spec.target):
            return Proof(False, f"{self.spec.params['process']} is still frozen")
        return _proof(self.spec, await _seen(self.spec, self._doors))
