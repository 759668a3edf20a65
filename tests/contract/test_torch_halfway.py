"""Sleeping and waking the torch engine that fail, or are given up, half-way: it sleeps or it serves, and says
which of the two."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.faults import WakeFailed
from services.llama.layerwise import LayerwiseEngine
from tests.contract.torch_engines import answer, ids_of, request, started, until
from tests.llama_models import build, greedy, prompt

pytestmark = pytest.mark.torch
ASK = request(prompt(2, 40), 4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("gqa"))


def fails(*_: Any, **__: Any) -> Any:
    raise RuntimeError("CUDA error: out of memory")


async def serves(engine: Any, folder: Path) -> None:
    assert await ids_of(engine, ASK) == greedy(folder, ASK.prompt_ids, 4)
    stats = engine.stats()
    pool = stats.extra.get("kv_pool_bytes", 0)
    assert stats.memory_bytes == engine.model.weights.nbytes + pool > 0


async def sleeps(engine: Any) -> None:
    with pytest.raises(RuntimeError, match="sleeps"):
        await answer(engine, ASK)
    assert engine.stats().memory_bytes == 0


class Gate:
    """Holds whoever comes through until it is opened."""

    def __init__(self, real: Callable[..., Any]) -> None:
        self._real, self.inside, self.open = real, threading.Event(), threading.Event()

    def __call__(self, *args: Any, **more: Any) -> Any:
        self.inside.set()
        assert self.open.wait(60)
        return self._real(*args, **more)


@pytest.mark.parametrize("options", [{}, {"mode": "layerwise", "kv_tokens": None}], ids=str)
def test_a_sleep_that_gave_nothing_back_leaves_it_serving(options: dict[str, Any], folder: Path) -> None:
    async def check() -> None:
        async with started(folder, **options) as engine:
            weights = engine.model.weights
            weights.park = fails
            with pytest.raises(RuntimeError, match="out of memory"):
                await engine.sleep()
            await serves(engine, folder)
            await engine.wake()
            del weights.park
            await engine.sleep()
            await sleeps(engine)
            weights.drop = fails
            with pytest.raises(RuntimeError, match="out of memory"):
                await engine.sleep(2)
            await sleeps(engine)
            await engine.wake()
            await serves(engine, folder)

    asyncio.run(check())


@pytest.mark.parametrize("begun", [False, True])
def test_who_gives_up_waiting_for_sleep(begun: bool, folder: Path) -> None:
    """What has not begun doesn't happen, what has comes to its end."""

    async def check() -> None:
        async with started(folder) as engine:
            before = Gate(lambda: None)
            busy = engine._later(before)
            gate = engine.model.park = Gate(engine.model.park)
            engine.model.quiet = _quiet(engine.model)
            sleeping = asyncio.create_task(engine.sleep())
            await until(before.inside.is_set)
            await asyncio.sleep(0)
            if begun:
                before.open.set()
                await until(gate.inside.is_set)
            sleeping.cancel()
            await asyncio.wait((sleeping,))
            assert sleeping.cancelled()
            before.open.set()
            gate.open.set()
            await asyncio.wrap_future(busy)
            await engine.settle()
            if begun:
                await sleeps(engine)
                await engine.wake()
            await serves(engine, folder)

    asyncio.run(check())


def _quiet(model: Any) -> Callable[[], Any]:
    """As Model.quiet, in a worker that is busy."""

    async def quiet() -> None:
        model.asleep = True

    return quiet


def test_who_gives_up_waiting_for_a_wake_finds_it_awake(folder: Path) -> None:
    async def check() -> None:
        async with started(folder) as engine:
            await engine.sleep()
            gate = engine.model.unpark = Gate(engine.model.unpark)
            waking = asyncio.create_task(engine.wake())
            await until(gate.inside.is_set)
            waking.cancel()
            await asyncio.wait((waking,))
            gate.open.set()
            await engine.settle()
            await serves(engine, folder)
            await engine.wake()
            await engine.sleep(2)
            await sleeps(engine)

    asyncio.run(check())


def test_who_came_in_by_a_wake_that_was_given_up_is_not_slept_under(folder: Path) -> None:
    async def check() -> None:
        async with started(folder) as engine:
            await engine.sleep()
            gate = engine.model.unpark = Gate(engine.model.unpark)
            waking = asyncio.create_task(engine.wake())
            await until(gate.inside.is_set)
            waking.cancel()
            await asyncio.wait((waking,))
            settle, made = engine.settle, engine.generate(request(ASK.prompt_ids, 200))

            async def settles() -> None:
                gate.open.set()
                await settle()
                await anext(made)

            engine.settle = settles
            with pytest.raises(RuntimeError, match="running"):
                await engine.sleep()
            await made.aclose()
            await serves(engine, folder)

    asyncio.run(check())


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("where", ["take", "witness"])
@pytest.mark.parametrize("parks", [True, False], ids=["parks again", "can't park again"])
def test_a_wake_that_fails_after_the_weights_are_back(
    where: str, parks: bool, level: int, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def check() -> None:
        async with started(folder) as engine:
            core, model = engine._core, engine.model
            await engine.sleep(level)
            real, park = getattr(core, where), model.park
            setattr(core, where, fails)
            if not parks:
                model.park = lambda level: park(level) if level == 2 else fails()
            with pytest.raises(WakeFailed, match="out of memory"):
                await engine.wake()
            await sleeps(engine)
            assert engine.model.level == (level if parks else 2)
            setattr(core, where, real)
            model.park = park
            await engine.wake()
            await serves(engine, folder)

    asyncio.run(check())


def test_weights_that_answered_wrong_are_read_anew(folder: Path) -> None:
    """A copy of them would be as wrong at the next wake."""

    async def check() -> None:
        async with started(folder) as engine:
            await engine.sleep()
            core, real = engine._core, engine._core.witness
            core.witness = lambda: -real()
            with pytest.raises(WakeFailed, match="fixed prompt"):
                await engine.wake()
            await sleeps(engine)
            assert engine.model.level == 2
            core.witness = real
            await engine.wake()
            await serves(engine, folder)

    asyncio.run(check())


def test_a_wake_that_fails_leaves_the_other_engine_on_the_weights_alone(folder: Path) -> None:
    async def check() -> None:
        async with started(folder) as first:
            second = LayerwiseEngine(first)
            await second.start()
            await first.sleep()
            await second.sleep()
            await second.wake()
            wrong = -first._expected
            first._core.witness = lambda: wrong
            with pytest.raises(WakeFailed):
                await first.wake()
            with pytest.raises(RuntimeError, match="sleeps"):
                await answer(first, ASK)
            await serves(second, folder)
            await second.close()

    asyncio.run(check())


def test_a_sleep_that_gave_nothing_back_needs_no_room_to_wake(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU its own KV pool is why there is no room."""
    from services.llama import model as model_module

    async def check() -> None:
        async with started(folder) as engine:
            engine._asleep = engine.model.asleep = True
            monkeypatch.setattr(model_module, "free_bytes", lambda _: 0)
            generation = engine._core.pool.generation
            await engine.wake()
            assert engine._core.pool.generation == generation
            await serves(engine, folder)

    asyncio.run(check())


def test_a_step_that_hangs_is_not_waited_for_for_ever(folder: Path) -> None:
    """Its request was given up long ago."""

    async def check() -> None:
        async with started(folder) as engine:
            engine.quiet_s = 0.01
            gate = engine._core.step = Gate(engine._core.step)
            asked = asyncio.create_task(answer(engine, ASK))
            await until(gate.inside.is_set)
            asked.cancel()
            await asyncio.wait((asked,))
            with pytest.raises(RuntimeError, match="a step of torch"):
                await engine.sleep()
            gate.open.set()
            await serves(engine, folder)

    asyncio.run(check())


def test_asleep_no_buffers_of_graphs_are_left(folder: Path) -> None:
    async def check() -> None:
        async with started(folder, graphs="on") as engine:
            await answer(engine, ASK)
            core = engine._core
            assert (len(core._steps), core._room.nbytes > 0) == (1, True)
            await engine.sleep()
            assert (len(core._steps), core._room.nbytes) == (0, 0)
            buffer, core.pool.buffer = core.pool.buffer, lambda blocks: buffer(0) if not blocks else fails()
            with pytest.raises(WakeFailed, match="out of memory"):
                await engine.wake()
            await sleeps(engine)
            core.pool.buffer = buffer
            await engine.wake()
            assert core.missing == 0
            await serves(engine, folder)

    asyncio.run(check())
