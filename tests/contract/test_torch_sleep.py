"""Sleeping and waking the torch engine: memory goes, the same tokens come back, and a bad wake is seen."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path

import psutil
import pytest

from services.engine import EngineStats
from services.faults import WakeFailed
from services.llama import model as model_module
from services.llama.layerwise import LayerwiseEngine
from services.llama.witness import otherwise
from tests.contract.torch_engines import answer, ids_of, request, started
from tests.llama_models import build, greedy, prompt

pytestmark = pytest.mark.torch

IDS = prompt(2, 40)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("gqa"))


@pytest.mark.parametrize("level", [1, 2])
def test_twenty_cycles_same_tokens_and_no_growth(level: int, tmp_path: Path) -> None:
    # 12 MB of weights: a copy left behind in each cycle would be seen.
    folder = build(
        tmp_path, hidden_size=256, intermediate_size=768, num_hidden_layers=4, initializer_range=0.06
    )
    expected = greedy(folder, IDS, 8)
    process = psutil.Process()

    async def check() -> list[int]:
        sizes = []
        async with started(folder, kv_tokens=4096) as engine:
            for _ in range(20):
                assert await ids_of(engine, request(IDS, 8)) == expected
                await engine.sleep(level)
                assert engine.stats().memory_bytes == 0
                sizes.append(process.memory_info().rss)
                await engine.wake()
        return sizes

    sizes = asyncio.run(check())
    # The least: what others in this process hold for a moment isn't a copy that stayed.
    assert min(sizes[10:]) - max(sizes[2:6]) < 8 << 20


def test_it_does_not_sleep_while_anything_runs_nor_generate_while_asleep(folder: Path) -> None:
    async def check() -> None:
        async with started(folder) as engine:
            async with aclosing(engine.generate(request(IDS, 200))) as made:
                await anext(made)
                with pytest.raises(RuntimeError, match="running"):
                    await engine.sleep()
                assert (await anext(made)).token_id >= 0
            # Closed: it may sleep at once, though the worker may not have heard of it yet.
            await engine.sleep()
            assert engine.stats() == EngineStats(
                tokens=engine.stats().tokens,
                prompt_tokens=40,
                extra={"kv_pool_bytes": 0.0, "steps": engine.stats().extra["steps"]},
            )
            with pytest.raises(RuntimeError, match="sleeps"):
                await answer(engine, request(IDS, 2))
            assert engine.size(request(IDS, 2)) == 40
            await engine.sleep(2)
            await engine.wake()
            assert await ids_of(engine, request(IDS, 8)) == greedy(folder, IDS, 8)

    asyncio.run(check())


def test_other_weights_after_waking_are_seen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        async with started(folder) as engine:
            await engine.sleep()
            weights = engine.model.weights
            unpark = weights.unpark

            def spoilt() -> None:
                unpark()
                weights.tensors["model.layers.1.mlp.up_proj.weight"].mul_(-1)

            with monkeypatch.context() as patch:
                patch.setattr(weights, "unpark", spoilt)
                with pytest.raises(WakeFailed, match="fixed prompt"):
                    await engine.wake()
            assert engine.stats().memory_bytes == 0
            with pytest.raises(RuntimeError, match="sleeps"):
                await answer(engine, request(IDS, 2))
            await engine.wake()
            assert await ids_of(engine, request(IDS, 8)) == greedy(folder, IDS, 8)

    asyncio.run(check())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_tensor_and_the_kv_pool_take_part_in_what_a_wake_compares(folder: Path, dtype: str) -> None:
    async def check() -> None:
        async with started(folder, dtype=dtype) as engine:
            core, before = engine._core, engine._expected
            assert core is not None
            assert before is not None

            def seen() -> bool:
                return bool(otherwise(before, core.witness(), engine.model.dtype))

            assert not seen()
            for name, tensor in engine.model.weights.tensors.items():
                kept = tensor.clone()
                for spoil in (tensor.zero_, tensor.neg_):
                    spoil()
                    assert seen(), (name, spoil)
                    tensor.copy_(kept)
            assert not seen()
            gather = core.pool.gather
            core.pool.gather = lambda *how: gather(*how).zero_()  # type: ignore[method-assign]
            assert seen(), "K and V come from the pool"

    asyncio.run(check())


def test_who_gives_up_waiting_for_sleep_leaves_an_engine_that_wakes(folder: Path) -> None:
    async def check() -> None:
        async with started(folder) as engine:
            for turns in range(6):
                sleeping = asyncio.create_task(engine.sleep())
                for _ in range(turns):
                    await asyncio.sleep(0)
                sleeping.cancel()
                await asyncio.wait([sleeping])
                await engine.wake()
                assert await ids_of(engine, request(IDS, 4)) == greedy(folder, IDS, 4)

    asyncio.run(check())


def test_without_room_it_stays_asleep(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        async with started(folder) as engine:
            await engine.sleep()
            with monkeypatch.context() as patch:
                patch.setattr(model_module, "free_bytes", lambda _: engine.kv_pool_bytes)
                with pytest.raises(WakeFailed, match="are free"):
                    await engine.wake()
            assert engine.stats().memory_bytes == 0
            await engine.wake()
            assert await ids_of(engine, request(IDS, 8)) == greedy(folder, IDS, 8)

    asyncio.run(check())


def test_two_engines_on_the_same_weights_sleep_and_wake_together(folder: Path) -> None:
    expected = greedy(folder, IDS, 8)

    async def check() -> None:
        async with started(folder) as first:
            second = LayerwiseEngine(first)
            await second.start()
            try:
                assert first.model.weights is second.model.weights
                assert await ids_of(second, request(IDS, 8)) == expected
                async with aclosing(second.generate(request(IDS, 100))) as made:
                    await anext(made)
                    with pytest.raises(RuntimeError, match="running"):
                        await first.sleep()
                for order in ((first, second), (second, first)):
                    for engine in order:
                        await engine.sleep()
                    with pytest.raises(RuntimeError, match="sleeps"):
                        await answer(second, request(IDS, 2))
                    for engine in order:
                        await engine.wake()
                    assert await ids_of(first, request(IDS, 8)) == expected
                    assert await ids_of(second, request(IDS, 8)) == expected
            finally:
                await second.close()
            assert await ids_of(first, request(IDS, 8)) == expected, "its weights are still there"

    asyncio.run(check())


def test_the_second_engine_refuses_while_the_first_alone_sleeps(folder: Path) -> None:
    async def check() -> None:
        async with started(folder) as first:
            second = LayerwiseEngine(first)
            await second.start()
            await first.sleep()
            with pytest.raises(RuntimeError, match="sleeps"):
                await answer(second, request(IDS, 2))
            await second.close()

    asyncio.run(check())
