"""The torch engine's greedy fp32 tokens are those of transformers on the same weights, however made."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from services.batching.scheduled import Scheduled
from services.engines import make_engine
from services.models.store import find
from tests.contract.torch_engines import at_once, at_zero, ids_of, request, staggered, started
from tests.llama_models import KINDS, build, greedy, prompt

pytestmark = pytest.mark.torch

ANSWER = 24
PROMPTS = [prompt(i, 1 + 9 * i) for i in range(6)]


@pytest.fixture(scope="module")
def gqa(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("gqa"))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_one_by_one_and_together(kind: str, tmp_path: Path) -> None:
    folder = build(tmp_path, kind, seed=3)
    expected = [greedy(folder, ids, ANSWER) for ids in PROMPTS]

    async def check() -> None:
        async with started(folder) as engine:
            assert [await ids_of(engine, request(ids, ANSWER)) for ids in PROMPTS[:2]] == expected[:2]
            assert await staggered(engine, [request(ids, ANSWER) for ids in PROMPTS]) == expected
            assert at_zero(engine)

    asyncio.run(check())


@pytest.mark.parametrize(
    "options",
    [
        {"block": 1},
        {"block": 7, "chunk": 5},
        {"block": 64, "max_sequences": 2},
        {"block": 4, "kv_tokens": 96, "chunk": 16},
        {"graphs": "on"},
        {"graphs": "on", "block": 4, "kv_tokens": 96},
        {"mode": "layerwise", "kv_tokens": None},
    ],
    ids=str,
)
def test_whatever_the_blocks_and_steps(options: dict[str, Any], gqa: Path) -> None:
    expected = [greedy(gqa, ids, ANSWER) for ids in PROMPTS]
    asked = [request(ids, ANSWER) for ids in PROMPTS]

    async def check() -> int:
        async with started(gqa, **options) as engine:
            assert await staggered(engine, asked) == expected
            # Where the loop is slow, one ends before the next begins, and nobody is in anybody's way.
            assert await at_once(engine, asked) == expected
            assert at_zero(engine)
            return int(engine.stats().preemptions)

    preempted = asyncio.run(check())
    assert (preempted > 0) == (options.get("kv_tokens") == 96), "a tiny pool preempts, a large one never"


def test_a_window_gives_blocks_back_and_changes_no_token(tmp_path: Path) -> None:
    folder = build(tmp_path, "mistral")
    ids = prompt(1, 60)

    async def check() -> list[int]:
        # The sequence is far longer than the whole pool; the scheduler in front counts by the window too.
        options = {"device": "cpu", "threads": "1", "block": "4", "kv_tokens": "60", "chunk": "8"}
        engine = Scheduled(make_engine("torch", options, str(folder)))
        await engine.start()
        try:
            assert (engine.facts().kv_window, engine.facts().kv_chunk) == (24, 8)
            return await ids_of(engine, request(ids, 60))
        finally:
            await engine.close()

    assert asyncio.run(check()) == greedy(folder, ids, 60)


@pytest.mark.parametrize("graphs", ["off", "on"])
def test_one_long_sequence_among_short_ones(graphs: str, gqa: Path) -> None:
    prompts = [prompt(0, 200), *(prompt(i, 3) for i in range(1, 6))]
    expected = [greedy(gqa, ids, ANSWER) for ids in prompts]

    async def check() -> None:
        async with started(gqa, block=2, kv_tokens=420, graphs=graphs) as engine:
            assert await staggered(engine, [request(ids, ANSWER) for ids in prompts]) == expected

    asyncio.run(check())


def test_weights_in_several_files(tmp_path: Path) -> None:
    folder = build(tmp_path, shards=True)
    assert len(list(folder.glob("*.safetensors"))) > 1

    async def check() -> list[int]:
        async with started(folder) as engine:
            return await ids_of(engine, request(PROMPTS[3], ANSWER))

    assert asyncio.run(check()) == greedy(folder, PROMPTS[3], ANSWER)


@pytest.mark.slow
def test_smollm2() -> None:
    folder = find("smollm2-135m-instruct")
    prompts = [(504, 3575, 282, 4649, 314), tuple(range(300, 340))]
    expected = [greedy(folder, ids, 32) for ids in prompts]

    async def check() -> None:
        async with started(folder, threads=1) as engine:
            asked = [request(ids, 32, ignore_eos=True) for ids in prompts]
            assert await staggered(engine, asked) == expected

    asyncio.run(check())
