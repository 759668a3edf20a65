"""The end of a torch engine: dead or alive, in the middle of whatever, all that it held is given back."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import weakref
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from services.engine import EngineStats
from services.engines.torch import make
from services.faults import DeviceLost, EngineDied
from services.llama import model as model_module
from services.llama.layerwise import LayerwiseEngine
from services.weights import open_weights
from tests.contract.torch_engines import PATIENCE_S, FirstStep, answer, ids_of, request, started, until
from tests.llama_models import build, greedy, prompt

pytestmark = pytest.mark.torch
OPTIONS = {"device": "cpu", "threads": "1", "kv_tokens": "512"}
ASK = request(prompt(1, 9), 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("gqa"))


class Held:
    """What an engine holds, seen from outside; the engine itself is kept, as the pool keeps it until the next
    one has started."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.core = engine, weakref.ref(engine._core)
        self.pool, self.weights = engine._core.pool, engine.model.weights
        self.thread: threading.Thread = engine._serving.worker._thread

    def gone(self) -> bool:
        left = (self.core(), self.engine._intake, self.engine.model._tokenizer, self.engine.model._weights)
        return not (self.pool.held_bytes or self.weights.resident_bytes() or any(left))


@contextmanager
def no_collector() -> Iterator[None]:
    """Memory of a device must not wait for the collector of cycles."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def fails(*_: Any, **__: Any) -> Any:
    raise ValueError("broken on order")


@pytest.mark.parametrize("options", [{}, {"graphs": "on"}], ids=str)
@pytest.mark.parametrize("state", ["alive", "dead", "asleep"])
def test_closed_it_holds_nothing_though_somebody_keeps_it(
    state: str, options: dict[str, str], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def check() -> None:
        async with started(folder, **options) as engine:
            await answer(engine, ASK)
            held, facts = Held(engine), engine.facts()
            if state == "dead":
                engine._core.step = fails
                with pytest.raises(EngineDied):
                    await answer(engine, ASK)
            elif state == "asleep":
                await engine.sleep()
            await engine.close()
            assert held.gone()
            assert (engine.facts(), engine.stats()) == (facts, EngineStats())

    # A record that is kept keeps the frames of its traceback, and they the core.
    with no_collector(), caplog.at_level(logging.CRITICAL, "weir.torch"):
        asyncio.run(check())


def test_before_start_and_after_close(folder: Path) -> None:
    async def check() -> None:
        engine = make(str(folder), {"device": "cpu"})
        assert engine.stats().running == 0
        with pytest.raises(RuntimeError, match="not started"):
            await answer(engine, request((1,), 1))
        with pytest.raises(RuntimeError, match="not started"):
            engine.size(request((1,), 1))
        await engine.close()
        await engine.start()
        await engine.close()
        await engine.close()
        with pytest.raises(RuntimeError, match="closed"):
            await answer(engine, request((1,), 1))
        assert engine.stats().memory_bytes == 0

    asyncio.run(check())


def test_closed_before_the_worker_has_begun_to_listen(folder: Path) -> None:
    """The worker finds the end and everything before it in one go."""

    async def check() -> None:
        async with started(folder) as engine:
            held = Held(engine)
            calls = [engine._later(lambda: None) for _ in range(3)]
            assert calls[1].cancel() or calls[1].done()
            closing = asyncio.create_task(engine.close())
            asked = asyncio.create_task(answer(engine, ASK))
            assert isinstance(*await asyncio.gather(asked, return_exceptions=True), RuntimeError)
            await closing
            assert held.gone()
            assert calls[2].done(), "nobody waits for ever"

    asyncio.run(check())


def test_whoever_gives_up_closing_does_not_keep_it_open(folder: Path) -> None:
    async def check() -> None:
        async with started(folder) as engine:
            held = Held(engine)
            closing = asyncio.create_task(engine.close())
            await asyncio.sleep(0)
            closing.cancel()
            await asyncio.wait((closing,))
            await until(held.gone)

    asyncio.run(check())


def test_closed_while_it_loads_it_gives_back_what_came(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    inside, release = threading.Event(), threading.Event()
    loaded, real = list[Any](), open_weights

    def slow(*args: Any, **more: Any) -> Any:
        inside.set()
        release.wait(60)
        loaded.append(real(*args, **more))
        return loaded[0]

    async def check() -> None:
        monkeypatch.setattr(model_module, "open_weights", slow)
        engine = make(str(folder), OPTIONS)
        engine.patience_s = 0.01
        starting = asyncio.create_task(engine.start())
        await until(inside.is_set)
        starting.cancel()
        await asyncio.wait((starting,))
        await engine.close()
        assert "holds all memory" in caplog.text
        release.set()
        await until(lambda: bool(loaded) and not loaded[0].resident_bytes())
        assert engine.facts().weights_bytes >= 0

    try:
        asyncio.run(check())
    finally:
        release.set()


def test_the_weights_stay_while_another_engine_runs_on_them(folder: Path) -> None:
    async def check() -> None:
        async with started(folder) as first:
            second = LayerwiseEngine(first)
            await second.start()
            facts = second.facts()
            await first.close()
            assert await ids_of(second, ASK) == greedy(folder, ASK.prompt_ids, 2)
            weights = second.model.weights
            await second.close()
            assert (weights.resident_bytes(), second.facts()) == (0, facts)

    asyncio.run(check())


@pytest.mark.parametrize("where", ["add", "reap", "busy", "step"])
def test_whatever_fails_in_the_worker_is_the_death_of_the_engine_and_told(
    where: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def check() -> None:
        async with started(folder) as engine:
            held, first = Held(engine), FirstStep(engine)
            async with aclosing(engine.generate(request(prompt(2, 9), 200))) as made:
                await anext(made)
                setattr(engine._core, where, fails)
                first.go.set()
                for _ in range(2):
                    with pytest.raises(EngineDied, match="broken on order"):
                        await answer(engine, ASK)
                with pytest.raises(EngineDied, match="broken on order"):
                    async for _ in made:
                        pass
            assert "broken on order" in engine.stats().dead
            await engine.close()
            assert held.gone()

    with caplog.at_level(logging.CRITICAL, "weir.torch"):
        asyncio.run(check())


def test_who_was_finished_in_the_step_that_failed_hears_of_it_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sequence is no longer the core's, and its last token is lost."""

    async def check() -> None:
        async with started(folder) as engine:
            real, core, together = engine._core._outcome, engine._core, threading.Event()

            def second_fails(sequence: Any, *row: Any) -> Any:
                return real(sequence, *row) if sequence.limit == 1 else fails()

            monkeypatch.setattr(core, "_outcome", second_fails)
            engine._later(together.wait)
            both = [asyncio.create_task(answer(engine, request(prompt(2, 9), n))) for n in (1, 3)]
            await until(lambda: engine.open == 2)
            together.set()
            _, pending = await asyncio.wait(both, timeout=PATIENCE_S)
            assert not pending
            assert [type(one.exception()) for one in both] == [EngineDied, EngineDied]

    asyncio.run(check())


def test_a_device_that_is_lost_at_the_start_is_told_as_such(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the pool looks for another one."""
    import torch

    def lost(*_: Any, **__: Any) -> Any:
        raise torch.AcceleratorError("CUDA error: the device fell off the bus")

    async def check() -> None:
        monkeypatch.setattr(model_module, "open_weights", lost)
        engine = make(str(folder), OPTIONS)
        try:
            with pytest.raises(DeviceLost, match="fell off"):
                await engine.start()
        finally:
            await engine.close()

    asyncio.run(check())
