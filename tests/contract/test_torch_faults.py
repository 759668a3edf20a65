"""What goes wrong in a step: whom it costs, and that the rest goes on."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import torch

from services.engine import Token
from services.faults import BadLogits, DeviceLost, EngineDied, EngineFault, OutOfDeviceMemory
from services.llama.tokenizer import Detokenizer
from tests.contract.torch_engines import FirstStep, answer, at_zero, ids_of, request, started, until
from tests.llama_models import build, greedy, prompt

pytestmark = pytest.mark.torch

POISON = 200


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("gqa"))


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("poisoned"), poison=POISON)


@pytest.mark.parametrize("options", [{}, {"mode": "layerwise", "kv_tokens": None}, {"graphs": "on"}], ids=str)
def test_nan_costs_the_sequence_that_has_it_alone(options: dict[str, Any], poisoned: Path) -> None:
    good, bad = prompt(1, 12), (1, 2, POISON, 3)
    expected = greedy(poisoned, good, 24)
    assert POISON not in expected

    async def check() -> None:
        async with started(poisoned, **options) as engine:
            other = asyncio.create_task(ids_of(engine, request(good, 24)))
            with pytest.raises(BadLogits):
                await answer(engine, request(bad, 8))
            assert await other == expected
            await until(lambda: at_zero(engine))
            assert not engine.stats().dead

    asyncio.run(check())


def test_nobody_inherits_nan_with_a_block(poisoned: Path) -> None:
    good = prompt(1, 12)

    async def check() -> None:
        # Four blocks: whoever comes next gets what the bad one wrote.
        async with started(poisoned, block=16, kv_tokens=64) as engine:
            for _ in range(3):
                with pytest.raises(BadLogits):
                    await answer(engine, request((*prompt(5, 40), POISON, 3), 8))
                assert await ids_of(engine, request(good, 24)) == greedy(poisoned, good, 24)

    asyncio.run(check())


async def _drain(made: AsyncGenerator[Token, None]) -> None:
    async for _ in made:
        pass


def _exhaust(*_: Any, **__: Any) -> Any:
    return torch.empty(1 << 60)


def _device_exhausted(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("fault", [_exhaust, _device_exhausted])
@pytest.mark.parametrize("options", [{}, {"mode": "layerwise", "kv_tokens": None}], ids=str)
def test_out_of_memory_costs_the_step_and_the_engine_goes_on(
    options: dict[str, Any], fault: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = prompt(2, 12)

    async def check() -> None:
        async with started(folder, **options) as engine:
            decoder = engine._core.decoder
            with monkeypatch.context() as patch:
                patch.setattr(decoder, "enter", fault)
                with pytest.raises(OutOfDeviceMemory):
                    await answer(engine, request(ids, 8))
            await until(lambda: at_zero(engine))
            assert not engine.stats().dead
            assert await ids_of(engine, request(ids, 8)) == greedy(folder, ids, 8)

    asyncio.run(check())


def test_anything_else_kills_the_engine_and_all_who_wait_hear_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise ValueError("broken on order")

    async def check() -> None:
        async with started(folder, max_sequences=1) as engine:
            first = FirstStep(engine)
            async with aclosing(engine.generate(request(prompt(1, 9), 200))) as made:
                await anext(made)
                waiting = asyncio.create_task(answer(engine, request(prompt(2, 9), 9)))
                await asyncio.sleep(0)
                monkeypatch.setattr(engine._core.decoder, "enter", broken)
                first.go.set()
                with pytest.raises(EngineDied, match="broken on order"):
                    await _drain(made)
            with pytest.raises(EngineDied):
                await waiting
            assert "broken on order" in engine.stats().dead
            with pytest.raises(EngineDied):
                await answer(engine, request(prompt(1, 9), 2))
            with pytest.raises(EngineDied):
                engine.size(request(prompt(1, 9), 2))
            await until(lambda: at_zero(engine))

    with caplog.at_level(logging.CRITICAL):
        asyncio.run(check())


def test_a_fault_of_the_device_is_told_as_such(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def lost(*_: Any, **__: Any) -> Any:
        raise torch.AcceleratorError("CUDA error: the device fell off the bus")

    async def check() -> None:
        async with started(folder) as engine:
            monkeypatch.setattr(engine._core.decoder, "enter", lost)
            with pytest.raises(DeviceLost, match="fell off"):
                await answer(engine, request(prompt(1, 9), 2))
            assert "fell off" in engine.stats().dead

    asyncio.run(check())


def test_a_token_that_gives_no_text_costs_its_answer_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The tokens of a step come in one call, and the tokenizer is the library's."""
    ids, real = prompt(1, 12), Detokenizer.feed

    async def check() -> None:
        async with started(folder) as engine:
            good = asyncio.create_task(ids_of(engine, request(ids, 24)))
            await asyncio.sleep(0)
            (other,) = engine._serving._streams.values()

            def feed(self: Detokenizer, token: int) -> str:
                if self is not other._detokenizer:
                    raise ValueError("no such token")
                return real(self, token)

            monkeypatch.setattr(Detokenizer, "feed", feed)
            for count in (1, 9):
                with pytest.raises(EngineFault, match="no such token"):
                    await answer(engine, request(prompt(2, 9), count))
            assert await good == greedy(folder, ids, 24)
            await until(lambda: at_zero(engine))
            assert not engine.stats().dead

    asyncio.run(check())


def test_a_step_that_hangs_stops_neither_the_loop_nor_closing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    inside, release = threading.Event(), threading.Event()

    def hang(*_: Any, **__: Any) -> Any:
        inside.set()
        release.wait(60)
        raise ValueError("woke up at last")

    async def check() -> threading.Thread:
        async with started(folder) as engine:
            engine.patience_s = 0.05
            thread: threading.Thread = engine._serving.worker._thread
            monkeypatch.setattr(engine._core.decoder, "enter", hang)
            stuck = asyncio.create_task(answer(engine, request(prompt(1, 9), 9)))
            await until(inside.is_set)
            assert engine.stats().running == 1
            with pytest.raises(RuntimeError, match="running"):
                await engine.sleep()
            await engine.close()
            with pytest.raises(EngineFault):
                await stuck
            return thread

    try:
        thread = asyncio.run(check())
        assert "hangs" in caplog.text
    finally:
        release.set()
    thread.join(30)
    assert not thread.is_alive()
