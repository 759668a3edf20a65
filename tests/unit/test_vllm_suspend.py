"""vLLM suspended by the driver: all of its processes or none, measured, resumed where there is room."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from services.devices.checkpoint import CheckpointFailed, FakeCheckpoints, ProcessState
from services.faults import WakeFailed
from services.vllm.memory import Level
from services.vllm.suspend import Suspender

API, CORE, WORKER = 10, 11, 12
TOTAL, EACH, NEIGHBOUR = 1000, 300, 200


class Card(FakeCheckpoints):
    """A driver with a GPU of its own: the API server is on none; each of the others holds EACH, and so do
    neighbours. kept: what a suspended process doesn't give back."""

    def __init__(self) -> None:
        super().__init__()
        self.kept, self.neighbour, self.refuses = 0, NEIGHBOUR, 0

    def state(self, pid: int) -> ProcessState:
        if pid == API:
            raise CheckpointFailed(pid, "state", "not initialised")
        return super().state(pid)

    def checkpoint(self, pid: int) -> None:
        if pid == self.refuses:
            raise CheckpointFailed(pid, "checkpoint", "it shares memory with another process")
        super().checkpoint(pid)

    async def level(self) -> Level:
        up = sum(self.state(pid) is ProcessState.RUNNING for pid in (CORE, WORKER))
        used = up * EACH + (2 - up) * self.kept + self.neighbour
        # Without processes of ours the driver's list is of no use, and all that is used is told.
        return Level(up * EACH or used, TOTAL - used)


def lived(test: Callable[[Card, Suspender], object]) -> None:
    card = Card()
    asyncio.run(test(card, Suspender(card, lambda: (API, CORE, WORKER), card.level, 0.9)))  # type: ignore[arg-type]


def test_all_go_and_come_back_and_neighbours_are_not_counted() -> None:
    async def test(card: Card, it: Suspender) -> None:
        assert await it.measure() == Level(2 * EACH, 200)
        await it.sleep(1)
        assert (it.freed, await it.measure()) == (2 * EACH, Level(0, 800))
        assert [card.state(pid) for pid in (CORE, WORKER)] == [ProcessState.CHECKPOINTED] * 2
        await it.wake(1)
        assert await it.measure() == Level(2 * EACH, 200)
        assert card.calls.count("unlock") == 2

    lived(test)


def test_one_that_refuses_brings_the_others_back() -> None:
    async def test(card: Card, it: Suspender) -> None:
        card.refuses = WORKER
        with pytest.raises(RuntimeError, match="process 12: checkpoint: it shares memory"):
            await it.sleep(1)
        assert [card.state(pid) for pid in (CORE, WORKER)] == [ProcessState.RUNNING] * 2
        await it.wake(1)
        assert await it.measure() == Level(2 * EACH, 200), "waking one that is awake does nothing"

    lived(test)


def test_what_is_not_given_back_is_told_and_can_be_undone() -> None:
    async def test(card: Card, it: Suspender) -> None:
        card.kept = 100
        with pytest.raises(RuntimeError, match="gave back"):
            await it.sleep(1)
        await it.wake(1)
        assert card.state(CORE) is ProcessState.RUNNING

    lived(test)


def test_without_room_nothing_is_touched_and_a_failed_resume_can_be_tried_again() -> None:
    async def test(card: Card, it: Suspender) -> None:
        await it.sleep(1)
        card.neighbour = 500
        with pytest.raises(WakeFailed, match="no room"):
            await it.wake(1)
        assert "restore" not in card.calls
        card.neighbour, card.fail = 0, "restore"
        with pytest.raises(WakeFailed, match="could not be resumed"):
            await it.wake(1)
        await it.wake(1)
        assert [card.state(pid) for pid in (CORE, WORKER)] == [ProcessState.RUNNING] * 2

    lived(test)


def test_a_server_on_no_gpu_does_not_sleep() -> None:
    async def test(card: Card, it: Suspender) -> None:
        alone = Suspender(card, lambda: (API,), card.level, 0.9)
        with pytest.raises(RuntimeError, match="no process of the server is on a GPU"):
            await alone.sleep(1)

    lived(test)
