"""The vllm engine's sleep and wake: what the server claims is not believed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from regions.cli.errors import UsageError, WeirError
from services.devices.checkpoint import FakeCheckpoints, ProcessState
from services.faults import EngineDied, WakeFailed
from services.vllm.memory import Level, on_host
from tests.contract.engine_subjects import Orders, stand_in
from tests.contract.engine_suite import answer, said
from tests.contract.vllm_stand_in import ASK, started
from tests.fakes.vllm_python import fake_python
from tests.fakes.vllm_wire import ORDERS

pytestmark = pytest.mark.real


@pytest.fixture
def orders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Orders:
    it = Orders(tmp_path)
    monkeypatch.setenv(ORDERS, str(it.file))
    return it


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_gives_memory_back_and_wake_takes_it_again(tmp_path: Path, orders: Orders, level: int) -> None:
    async def main() -> None:
        async with started(tmp_path) as engine:
            awake = engine.stats().memory_bytes
            await engine.sleep(level)
            assert engine.stats().memory_bytes < awake / 2
            await engine.wake()
            assert engine.stats().memory_bytes > awake * 0.9

    asyncio.run(main())


@pytest.mark.parametrize(
    ("order", "says"), [("lie", "does not"), ("keep", "gave back"), ("error", "would not sleep")]
)
def test_a_sleep_that_did_not_happen_is_told_and_it_serves_on(
    tmp_path: Path, orders: Orders, order: str, says: str
) -> None:
    async def main() -> None:
        async with started(tmp_path) as engine:
            before = said(await answer(engine, ASK()))
            orders.give(sleep=order)
            with pytest.raises(RuntimeError, match=says):
                await engine.sleep(1)
            assert said(await answer(engine, ASK())) == before
            assert not engine.stats().dead
            orders.give()
            await engine.sleep(1)
            await engine.wake()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("order", "says"), [("oom", "out of memory"), ("lie", "is not"), ("garbage", "other tokens")]
)
def test_a_wake_that_failed_leaves_it_asleep(tmp_path: Path, orders: Orders, order: str, says: str) -> None:
    async def main() -> None:
        async with started(tmp_path) as engine:
            await engine.sleep(1)
            orders.give(wake=order)
            with pytest.raises(WakeFailed, match=says):
                await engine.wake()
            with pytest.raises(RuntimeError, match="sleeps"):
                await answer(engine, ASK())
            assert isinstance(engine.stats().memory_bytes, int)

    asyncio.run(main())


def test_garbage_after_wake_gives_its_memory_back(tmp_path: Path, orders: Orders) -> None:
    async def main() -> None:
        async with started(tmp_path) as engine:
            awake = engine.stats().memory_bytes
            await engine.sleep(1)
            orders.give(wake="garbage")
            with pytest.raises(WakeFailed, match="other tokens"):
                await engine.wake()
            assert engine.stats().memory_bytes < awake / 2

    asyncio.run(main())


def test_it_does_not_wake_without_room(tmp_path: Path, orders: Orders) -> None:
    """vLLM is not even asked: running out of memory in its wake leaves blocks mapped for good."""
    free: list[int | None] = [None]

    def measure(pid: int) -> Level:
        return Level(on_host(pid).held, free[0])

    async def main() -> None:
        engine = stand_in(tmp_path, measure)
        try:
            await engine.start()
            before = said(await answer(engine, ASK()))
            await engine.sleep(1)
            free[0] = 1
            with pytest.raises(WakeFailed, match="no room"):
                await engine.wake()
            free[0] = 2**40
            await engine.wake()
            assert said(await answer(engine, ASK())) == before
        finally:
            await engine.close()

    asyncio.run(main())


def test_a_sleep_that_failed_and_a_wake_too_is_the_end(tmp_path: Path, orders: Orders) -> None:
    async def main() -> None:
        async with started(tmp_path) as engine:
            orders.give(sleep="keep", wake="oom")
            with pytest.raises(RuntimeError, match="gave back"):
                await engine.sleep(1)
            assert "did not sleep as it should" in engine.stats().dead
            with pytest.raises(EngineDied):
                await answer(engine, ASK())

    asyncio.run(main())


def test_where_the_platform_has_no_sleep_it_says_so(tmp_path: Path, orders: Orders) -> None:
    """The verbs of dev mode are not even open: on a CPU they stop the server and claim that all is well."""
    fake_python(tmp_path, cuda=None)

    async def main() -> None:
        async with started(tmp_path) as engine:
            assert engine.facts().sleep_levels == ()
            before = said(await answer(engine, ASK()))
            with pytest.raises(RuntimeError, match="no sleep level 1"):
                await engine.sleep(1)
            assert said(await answer(engine, ASK())) == before
        with pytest.raises(UsageError, match="no sleep mode"):
            await stand_in(tmp_path, sleep="on").start()

    asyncio.run(main())


def test_the_driver_suspends_a_server_that_has_no_sleep_mode(tmp_path: Path, orders: Orders) -> None:
    async def main() -> None:
        driver = FakeCheckpoints()

        def level(_: int) -> Level:
            return Level(0 if ProcessState.CHECKPOINTED in driver.states.values() else 1000)

        how = {"measure": level, "checkpoints": lambda: (driver, "")}
        async with started(tmp_path, sleep="checkpoint", **how) as engine:
            assert engine.facts().sleep_levels == (1,)
            before = said(await answer(engine, ASK()))
            await engine.sleep(1)
            assert set(driver.states.values()) == {ProcessState.CHECKPOINTED}
            with pytest.raises(RuntimeError, match="sleeps"):
                await answer(engine, ASK())
            await engine.wake()
            assert set(driver.states.values()) == {ProcessState.RUNNING}
            assert said(await answer(engine, ASK())) == before

    asyncio.run(main())


def test_without_a_driver_that_can_it_does_not_start(tmp_path: Path, orders: Orders) -> None:
    async def main() -> None:
        nothing = lambda: (None, "the driver has no process checkpoints")  # noqa: E731
        async with started(tmp_path, sleep="checkpoint", checkpoints=nothing):
            raise AssertionError("it started")

    with pytest.raises(WeirError, match="sleep=checkpoint: the driver has no process checkpoints"):
        asyncio.run(main())
