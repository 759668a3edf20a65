"""Process checkpoints of the driver: a child's GPU memory moves to host memory and back, contexts included.

Law: one door of five calls, and the two orders in which they may be made (`suspend`, `resume`): running →
locked → checkpointed → locked → running. A step that fails is undone as far as the driver allows. Used only
where cuda-bindings is installed and the driver is 570 or newer; `available` says why not. The process is
another one than ours: a locked process can't call CUDA, so it can't wake itself.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from importlib import import_module
from typing import Any, Protocol

from regions.cli.errors import WeirError

LOCK_MS = 10_000
"""Longest wait for the process to leave its CUDA calls."""


class ProcessState(StrEnum):
    RUNNING = "running"
    LOCKED = "locked"
    CHECKPOINTED = "checkpointed"
    FAILED = "failed"


class CheckpointFailed(WeirError):
    """The driver refused a step. reason: what it says. state: in which the process was left."""

    def __init__(self, pid: int, step: str, why: str, state: ProcessState | None = None) -> None:
        self.reason, self.state = why, state
        left = f"; it is {state} now" if state else ""
        super().__init__(f"checkpoint of process {pid}", f"{step}: {why}{left}", "start the engine cold")


class Checkpoints(Protocol):
    """Each call raises CheckpointFailed when the driver refuses it, for instance out of order."""

    def state(self, pid: int) -> ProcessState: ...
    def lock(self, pid: int, timeout_ms: int) -> None: ...
    def checkpoint(self, pid: int) -> None: ...
    def restore(self, pid: int) -> None: ...
    def unlock(self, pid: int) -> None: ...


def suspend(door: Checkpoints, pid: int, timeout_ms: int = LOCK_MS) -> None:
    """GPU memory of the process goes to host memory. It runs on as before when this raises."""
    _expect(door, pid, ProcessState.RUNNING)
    door.lock(pid, timeout_ms)
    try:
        door.checkpoint(pid)
    except CheckpointFailed as error:
        raise CheckpointFailed(pid, "checkpoint", error.reason, _undo(door, pid)) from error


def resume(door: Checkpoints, pid: int) -> None:
    """Undo `suspend`. When restoring fails the process stays checkpointed, or the driver calls it failed."""
    _expect(door, pid, ProcessState.CHECKPOINTED)
    door.restore(pid)
    door.unlock(pid)


def _undo(door: Checkpoints, pid: int) -> ProcessState:
    try:
        door.unlock(pid)
    except CheckpointFailed:
        return door.state(pid)
    return ProcessState.RUNNING


def _expect(door: Checkpoints, pid: int, wanted: ProcessState) -> None:
    if (found := door.state(pid)) is not wanted:
        raise CheckpointFailed(pid, f"it must be {wanted}", "it is not", found)


class CudaCheckpoints:
    """cuCheckpointProcess* by cuda-bindings. driver: the module cuda.bindings.driver, or a stand-in."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        kinds = driver.CUprocessState
        self._states = {getattr(kinds, f"CU_PROCESS_STATE_{s.name}"): s for s in ProcessState}

    def state(self, pid: int) -> ProcessState:
        """A state between two (checkpointing, restoring: newer drivers) is told as locked."""
        value = self._call("state", pid, "cuCheckpointProcessGetState")
        return self._states.get(value, ProcessState.LOCKED)

    def lock(self, pid: int, timeout_ms: int) -> None:
        how = self._driver.CUcheckpointLockArgs()
        how.timeoutMs = timeout_ms
        self._call("lock", pid, "cuCheckpointProcessLock", how)

    def checkpoint(self, pid: int) -> None:
        self._call("checkpoint", pid, "cuCheckpointProcessCheckpoint", None)

    def restore(self, pid: int) -> None:
        self._call("restore", pid, "cuCheckpointProcessRestore", None)

    def unlock(self, pid: int) -> None:
        self._call("unlock", pid, "cuCheckpointProcessUnlock", None)

    def _call(self, step: str, pid: int, name: str, *args: Any) -> Any:
        call: Callable[..., tuple[Any, ...]] = getattr(self._driver, name)
        try:
            code, *rest = call(pid, *args)
        except RuntimeError as error:  # the binding found no such symbol in the driver
            raise CheckpointFailed(pid, step, str(error)) from error
        if code != self._driver.CUresult.CUDA_SUCCESS:
            raise CheckpointFailed(pid, step, getattr(code, "name", str(code)))
        return rest[0] if rest else None


def available(load: Callable[[str], Any] = import_module) -> tuple[Checkpoints | None, str]:
    """(the door, "") or (None, why not)."""
    try:
        driver = load("cuda.bindings.driver")
    except ImportError:
        return None, "cuda-bindings is not installed"
    if not hasattr(driver, "cuCheckpointProcessLock"):
        return None, "this cuda-bindings has no process checkpoints (12.8 or newer has)"
    try:
        code, *rest = driver.cuDriverGetVersion()
    except RuntimeError as error:
        return None, f"no driver: {error}"
    if code != driver.CUresult.CUDA_SUCCESS or rest[0] < NEEDS_CUDA:
        return None, "the driver has no process checkpoints (570 or newer has)"
    return CudaCheckpoints(driver), ""


NEEDS_CUDA = 12080
"""As cuDriverGetVersion counts: 12.8."""


class FakeCheckpoints:
    """Keeps the driver's rules for a handful of processes. fail: name of the step that is to fail next."""

    def __init__(self) -> None:
        self.states: dict[int, ProcessState] = {}
        self.calls: list[str] = []
        self.fail = ""

    def state(self, pid: int) -> ProcessState:
        return self.states.setdefault(pid, ProcessState.RUNNING)

    def lock(self, pid: int, timeout_ms: int) -> None:
        self._step("lock", pid, ProcessState.RUNNING, ProcessState.LOCKED)

    def checkpoint(self, pid: int) -> None:
        self._step("checkpoint", pid, ProcessState.LOCKED, ProcessState.CHECKPOINTED)

    def restore(self, pid: int) -> None:
        self._step("restore", pid, ProcessState.CHECKPOINTED, ProcessState.LOCKED)

    def unlock(self, pid: int) -> None:
        self._step("unlock", pid, ProcessState.LOCKED, ProcessState.RUNNING)

    def _step(self, name: str, pid: int, wanted: ProcessState, then: ProcessState) -> None:
        self.calls.append(name)
        if self.fail == name:
            self.fail = ""
            raise CheckpointFailed(pid, name, "failed on order", self.state(pid))
        if self.state(pid) is not wanted:
            raise CheckpointFailed(pid, name, f"needs {wanted}", self.state(pid))
        self.states[pid] = then
