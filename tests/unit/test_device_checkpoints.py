"""A process that is suspended on its GPU: the steps in order, and where a step that failed leaves it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from services.devices.checkpoint import (
    CheckpointFailed,
    CudaCheckpoints,
    FakeCheckpoints,
    ProcessState,
    available,
    resume,
    suspend,
)


def test_suspend_and_resume_take_the_steps_in_order() -> None:
    door = FakeCheckpoints()
    suspend(door, 7)
    assert door.state(7) is ProcessState.CHECKPOINTED
    resume(door, 7)
    assert (door.state(7), door.calls) == (ProcessState.RUNNING, ["lock", "checkpoint", "restore", "unlock"])


@pytest.mark.parametrize("step", ["lock", "checkpoint"])
def test_a_suspend_that_fails_leaves_the_process_running(step: str) -> None:
    door = FakeCheckpoints()
    door.fail = step
    with pytest.raises(CheckpointFailed, match=step):
        suspend(door, 7)
    assert door.state(7) is ProcessState.RUNNING
    suspend(door, 7)


def test_a_resume_that_fails_says_where_it_was_left() -> None:
    door = FakeCheckpoints()
    suspend(door, 7)
    door.fail = "restore"
    with pytest.raises(CheckpointFailed) as raised:
        resume(door, 7)
    assert raised.value.state is ProcessState.CHECKPOINTED
    resume(door, 7)


def test_steps_out_of_order_are_refused_before_anything_is_done() -> None:
    door = FakeCheckpoints()
    with pytest.raises(CheckpointFailed, match="must be checkpointed"):
        resume(door, 7)
    suspend(door, 7)
    with pytest.raises(CheckpointFailed, match="must be running"):
        suspend(door, 7)
    assert door.calls == ["lock", "checkpoint"]


class Driver:
    """cuda.bindings.driver as far as it is used: calls answer (code, value...)."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0)
    CUprocessState = SimpleNamespace(
        CU_PROCESS_STATE_RUNNING=0, CU_PROCESS_STATE_LOCKED=1, CU_PROCESS_STATE_CHECKPOINTED=2,
        CU_PROCESS_STATE_FAILED=3,
    )  # fmt: skip
    CUcheckpointLockArgs = SimpleNamespace

    def __init__(self, version: int = 12080) -> None:
        self.fake, self.version, self.timeout = FakeCheckpoints(), version, 0
        self.code: Any = 0

    def cuDriverGetVersion(self) -> tuple[Any, ...]:
        return 0, self.version

    def cuCheckpointProcessGetState(self, pid: int) -> tuple[Any, ...]:
        return 0, list(ProcessState).index(self.fake.state(pid))

    def _do(self, act: Callable[[], None]) -> tuple[Any, ...]:
        try:
            act()
        except CheckpointFailed:
            return (SimpleNamespace(name="CUDA_ERROR_ILLEGAL_STATE"),)
        return (self.code,)

    def cuCheckpointProcessLock(self, pid: int, how: Any) -> tuple[Any, ...]:
        self.timeout = how.timeoutMs
        return self._do(lambda: self.fake.lock(pid, how.timeoutMs))

    def cuCheckpointProcessCheckpoint(self, pid: int, _: Any) -> tuple[Any, ...]:
        return self._do(lambda: self.fake.checkpoint(pid))

    def cuCheckpointProcessRestore(self, pid: int, _: Any) -> tuple[Any, ...]:
        return self._do(lambda: self.fake.restore(pid))

    def cuCheckpointProcessUnlock(self, pid: int, _: Any) -> tuple[Any, ...]:
        return self._do(lambda: self.fake.unlock(pid))


def test_the_driver_is_called_as_its_binding_has_it() -> None:
    driver = Driver()
    door, why_not = available(lambda _: driver)
    assert isinstance(door, CudaCheckpoints)
    assert why_not == ""
    suspend(door, 7, timeout_ms=1234)
    assert (driver.timeout, door.state(7)) == (1234, ProcessState.CHECKPOINTED)
    resume(door, 7)
    with pytest.raises(CheckpointFailed, match="CUDA_ERROR_ILLEGAL_STATE"):
        door.unlock(7)


def no_module(name: str) -> Any:
    raise ModuleNotFoundError(name)


def no_symbol() -> Any:
    driver = Driver()

    def missing() -> Any:
        raise RuntimeError("Function cuDriverGetVersion not found")

    driver.cuDriverGetVersion = missing  # type: ignore[method-assign]
    return driver


@pytest.mark.parametrize(
    ("load", "why"),
    [
        (no_module, "not installed"),
        (lambda _: SimpleNamespace(), "no process checkpoints"),
        (lambda _: Driver(version=12040), "570 or newer"),
        (lambda _: no_symbol(), "no driver"),
    ],
)
def test_where_there_are_no_checkpoints_it_says_why(load: Callable[[str], Any], why: str) -> None:
    door, said = available(load)
    assert door is None
    assert why in said
