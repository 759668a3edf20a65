"""The pool over the torch engine: a hundred cycles of a tiny model leak nothing; garbage; its snapshot."""

from __future__ import annotations

import asyncio
import gc
import threading
from pathlib import Path

import psutil
import pytest

from mesh.clock import SystemClock
from services.engine import Engine, GenerateRequest
from services.engines import make_engine
from services.instance import Identity, Instance
from services.lifecycle import Lifecycle, State
from services.pool.hotstart import HotPool
from services.pool.parts import Parts, PoolSettings
from services.pool.renewable import Renewable
from services.pool.snapshot import MAX_BYTES, decode
from services.registration import Drain
from tests.held import Held, held_of, least_growth

pytestmark = pytest.mark.torch
WHO = Identity("chat", "chat-stable-0", "us-east-1", "z1", "stable", "7", "tiny")
CYCLES, MEASURED = 100, (20, 45, 70)
WORKER = "weir-torch"
OPTIONS = {"threads": "1", "kv_tokens": "512", "dtype": "float32", "device": "cpu"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.llama_models import build

    return build(tmp_path_factory.mktemp("models") / "tiny")


async def started(model: Path, file: Path) -> HotPool:
    engine = Renewable(lambda _: make_engine("torch", OPTIONS, str(model)))
    instance = Instance(WHO, engine, Lifecycle())
    settings = PoolSettings(drain=Drain(5.0, 0.0))
    pool = HotPool(
        Parts(instance, engine, SystemClock(), model_folder=model, snapshot_file=file, settings=settings)
    )
    await engine.start()
    instance.lifecycle.to(State.RUNNING)
    return pool


async def tokens(engine: Engine) -> list[int]:
    return [t.token_id async for t in engine.generate(GenerateRequest("r", "how deep", 8))]


def held(folder: Path) -> tuple[int, Held, int, int]:
    """(resident bytes, files, tasks, threads of engines)."""
    gc.collect()
    workers = sum(thread.name.startswith(WORKER) for thread in threading.enumerate())
    return psutil.Process().memory_info().rss, held_of(folder), len(asyncio.all_tasks()), workers


def test_a_hundred_cycles_leak_nothing_and_change_no_token(model: Path, tmp_path: Path) -> None:
    async def main() -> None:
        pool = await started(model, tmp_path / "s.snapshot")
        engine = pool.parts.engine
        before, awake, memory = await tokens(engine), engine.stats().memory_bytes, []
        for cycle in range(CYCLES):
            if cycle in MEASURED:
                size, *rest = held(model.parent.parent)
                memory.append(size)
            slept = await pool.sleep(1 + cycle % 2)
            assert slept.ok, slept
            assert engine.stats().memory_bytes <= awake // 10
            woken = await pool.wake()
            assert woken.ok, woken
            assert woken.recovered == ""
            stats = engine.stats()
            assert (stats.running, stats.waiting, stats.kv_used, stats.memory_bytes) == (0, 0, 0.0, awake)
        assert await tokens(engine) == before
        after, *rest_after = held(model.parent.parent)
        assert rest_after == rest
        assert rest[-1] == 1, "one engine, one worker"
        assert least_growth([*memory, after]) < 5 * 2**20, "what 25 cycles leave behind"
        assert engine.renewals == 0
        await engine.close()

    asyncio.run(main())


def test_weights_that_came_back_wrong_are_caught_and_started_cold(model: Path, tmp_path: Path) -> None:
    """The copy in memory is what broke: a wake that keeps it must not pass."""

    async def main() -> None:
        pool = await started(model, tmp_path / "s.snapshot")
        engine = pool.parts.engine
        before = await tokens(engine)
        assert (await pool.sleep()).ok
        weights = engine.inner.model.weights  # type: ignore[attr-defined]
        real = weights.unpark

        def comes_back_broken() -> None:
            real()
            weights.tensors["model.layers.0.self_attn.k_proj.weight"].zero_()

        weights.unpark = comes_back_broken
        woken = await pool.wake()
        assert woken.ok
        assert "the fixed prompt is answered otherwise" in woken.recovered
        assert (await tokens(engine), engine.renewals) == (before, 1)
        await engine.close()

    asyncio.run(main())


def test_the_snapshot_holds_the_map_of_the_weights_and_none_of_them(model: Path, tmp_path: Path) -> None:
    async def main() -> None:
        file = tmp_path / "s.snapshot"
        pool = await started(model, file)
        assert (await pool.sleep()).ok
        found = decode(file.read_bytes(), str(file))
        weights = sum(f.size for f in found.model.files if f.name.endswith(".safetensors"))
        assert len(found.model.tensors) > 20
        assert file.stat().st_size < min(weights, MAX_BYTES)
        assert (found.model.kv["layers"], found.model.kv["kv_heads"]) == (3, 2)
        assert found.facts["kv_tokens"] == 512
        assert found.held > 10 * found.asleep
        await pool.parts.engine.close()

    asyncio.run(main())
