"""The torch engine as an Engine: text, ends, refusals, cancelling, sampling, memory by type."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from regions.cli.errors import UsageError, WeirError
from services.engine import Engine, FinishReason, GenerateRequest, Message
from services.engines.torch import make
from services.faults import Refused
from services.llama.pool import shape_of
from services.llama.tokenizer import Detokenizer, load
from tests.contract.torch_engines import answer, at_zero, ids_of, request, staggered, started, until
from tests.llama_models import build, greedy, prompt

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("gqa"))


def test_it_is_an_engine_that_tells_what_it_is(folder: Path) -> None:
    async def check() -> None:
        async with started(folder, kv_tokens=100, max_sequences=3) as engine:
            assert isinstance(engine, Engine)
            facts = engine.facts()
            assert (facts.name, facts.context, facts.sequences, facts.device) == ("torch", 256, 3, "cpu")
            assert (facts.kv_tokens, facts.kv_block, facts.sleep_levels) == (112, 16, (1, 2))
            saved = load_file(folder / "model.safetensors")
            assert facts.weights_bytes == sum(t.nbytes for t in saved.values())
            with pytest.raises(RuntimeError, match="runs already"):
                await engine.start()
            tokens = await answer(engine, request(prompt(0, 5), 4))
            assert [t.engine for t in tokens] == ["torch"] * 4
            assert [t.prompt_tokens for t in tokens] == [5, 0, 0, 0]
            assert [t.finish for t in tokens] == [None, None, None, FinishReason.LENGTH]
            stats = engine.stats()
            assert (stats.tokens, stats.prompt_tokens, stats.dead) == (4, 5, "")
            assert stats.memory_bytes >= engine.kv_pool_bytes

    asyncio.run(check())


def test_text_is_that_of_the_tokenizer_and_never_half_a_character(folder: Path) -> None:
    words = "Wehr – 堰 🌊 weir"
    tokenizer = load(folder)
    pieces = Detokenizer(tokenizer)
    out = [pieces.feed(i) for i in tokenizer.encode(words)]
    assert "".join(out) == words
    assert not any("\ufffd" in piece for piece in out)
    assert len(out) > len(words), "characters of several tokens were among them"

    async def check() -> None:
        async with started(folder) as engine:
            asked = GenerateRequest("r", words, 40)
            assert engine.size(asked) == len(words.encode())
            tokens = await answer(engine, asked)
            whole = tokenizer.decode([t.token_id for t in tokens])
            assert "".join(t.text for t in tokens).startswith(whole.rstrip("\ufffd")[:20])

    asyncio.run(check())


def test_a_chat_goes_through_the_models_template(folder: Path) -> None:
    async def check() -> None:
        async with started(folder) as engine:
            chat = GenerateRequest("r", "flat", 3, messages=(Message("user", "hi"),))
            rendered = GenerateRequest("r", "<user>hi\n<assistant>", 3)
            assert engine.size(chat) == engine.size(rendered)
            assert await ids_of(engine, chat) == await ids_of(engine, rendered)

    asyncio.run(check())


def test_a_stop_string_and_an_end_token_end_it(tmp_path: Path, folder: Path) -> None:
    ids = prompt(2, 9)
    made = greedy(folder, ids, 30)
    eos = made[7]
    first = made.index(eos)
    ending = build(tmp_path, eos_token_id=eos)

    async def check() -> None:
        async with started(ending) as engine:
            tokens = await answer(engine, request(ids, 30))
            assert [t.token_id for t in tokens] == made[: first + 1]
            assert (tokens[-1].finish, tokens[-1].text) == (FinishReason.STOP, "")
            assert await ids_of(engine, request(ids, 30, ignore_eos=True)) == made
            pieces = [(t.token_id, t.text) for t in await answer(engine, request(ids, 30, ignore_eos=True))]
            at, stop = next((i, piece) for i, (_, piece) in enumerate(pieces) if piece and i > 2)
            found = await answer(engine, request(ids, 30, ignore_eos=True, stop=("never seen", stop)))
            assert found[-1].finish == FinishReason.STOP
            assert len(found) <= at + 1
            await until(lambda: at_zero(engine))

    asyncio.run(check())


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        (request(prompt(0, 256), 1), "context_length_exceeded"),
        (request(prompt(0, 250), 7), "context_length_exceeded"),
        (request(prompt(0, 100), 100), "context_length_exceeded"),
        (request((1, 256), 1), "invalid_token_id"),
        (request((-1,), 1), "invalid_token_id"),
        (GenerateRequest("r", "", 1), "empty_prompt"),
        (request((1,), 0), "invalid_max_tokens"),
    ],
)
def test_what_can_never_be_served_is_refused_before_any_work(
    asked: GenerateRequest, code: str, folder: Path
) -> None:
    async def check() -> None:
        # 128 tokens of cache: less than the model's context.
        async with started(folder, kv_tokens=128 if len(asked.prompt_ids) == 100 else 1024) as engine:
            with pytest.raises(Refused) as caught:
                await answer(engine, asked)
            assert (caught.value.status, caught.value.code) == (400, code)
            assert engine.stats().extra["steps"] == 0

    asyncio.run(check())


def test_cancelled_in_the_middle_slot_and_kv_are_free_and_others_go_on(folder: Path) -> None:
    ids = prompt(1, 20)

    async def check() -> None:
        async with started(folder) as engine:
            other = asyncio.create_task(ids_of(engine, request(ids, 60)))
            async with aclosing(engine.generate(request(prompt(2, 30), 200))) as made:
                await anext(made)
                await anext(made)
            waiting = asyncio.create_task(ids_of(engine, request(prompt(3, 30), 200)))
            await asyncio.sleep(0)
            waiting.cancel()
            assert await other == greedy(folder, ids, 60)
            await until(lambda: at_zero(engine))
            with pytest.raises(asyncio.CancelledError):
                await waiting

    asyncio.run(check())


def test_the_dice_are_the_sequences_own(folder: Path) -> None:
    asked = [
        request(prompt(i, 6), 16, temperature=0.9, seed=7, sample=i % 2, top_p=0.8 if i % 3 else 1.0)
        for i in range(6)
    ]

    async def check() -> None:
        async with started(folder) as engine:
            alone = [await ids_of(engine, one) for one in asked]
            assert await staggered(engine, [*asked, request(prompt(9, 9), 16)]) == [
                *alone,
                greedy(folder, prompt(9, 9), 16),
            ]
            again = request(prompt(0, 6), 16, temperature=0.9, seed=8)
            other_sample = request(prompt(0, 6), 16, temperature=0.9, seed=7, sample=5)
            assert await ids_of(engine, again) != alone[0] != await ids_of(engine, other_sample)
            tiny = request(prompt(0, 6), 16, temperature=1.5, top_p=1e-6, seed=3)
            assert await ids_of(engine, tiny) == greedy(folder, prompt(0, 6), 16)

    asyncio.run(check())


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_types_of_weights_and_cache(dtype: str, kv_dtype: str, folder: Path) -> None:
    ids = [prompt(i, 5 + 20 * i) for i in range(3)]

    async def check() -> None:
        async with started(folder, dtype=dtype, kv_dtype=kv_dtype, chunk=16) as engine:
            found = await staggered(engine, [request(one, 12) for one in ids])
            assert [len(one) for one in found] == [12] * 3
            model = engine.model
            shape = shape_of(model.config, model.kv_dtype, 16)
            assert engine.kv_pool_bytes == shape.pool_bytes(64) == engine._core.pool._whole.nbytes
            element = {"fp32": 4, "bf16": 2, "fp16": 2}[dtype] if kv_dtype == "auto" else 1
            assert engine.kv_pool_bytes == 2 * 3 * 2 * 12 * element * 1024
            if (dtype, kv_dtype) == ("fp16", "auto"):
                right = [token for one in ids for token in greedy(folder, one, 12)]
                pairs = zip([token for one in found for token in one], right, strict=True)
                close = sum(ours == theirs for ours, theirs in pairs)
                assert close > 18, "half precision strays now and then, not at once"

    asyncio.run(check())


def test_kv_memory_in_mebibytes(folder: Path) -> None:
    async def check() -> None:
        async with started(folder, kv_tokens=None, kv_memory_mb=1) as engine:
            assert 0 < (1 << 20) - engine.kv_pool_bytes < 16 * 2 * 3 * 2 * 12 * 4

    asyncio.run(check())


@pytest.mark.parametrize(
    ("options", "word"),
    [({"device": "cuda:7"}, "cuda:7"), ({"nonsense": "1"}, "nonsense"), ({"attention": "flash"}, "flash")],
)
def test_options_that_can_not_be(options: dict[str, str], word: str, folder: Path) -> None:
    async def check() -> None:
        engine = make(str(folder), options)
        try:
            await engine.start()
        finally:
            await engine.close()

    if torch.cuda.is_available():
        pytest.skip("this machine has what the test wants missing")
    with pytest.raises(UsageError, match=word):
        asyncio.run(check())


def test_a_model_that_is_not_there_or_not_whole(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no-such-model"):
        make("no-such-model", {})
    whole = build(tmp_path / "m")
    (whole / "tokenizer.json").unlink()

    async def start(path: Path, **options: Any) -> None:
        async with started(path, **options):
            pass

    with pytest.raises(WeirError, match=r"tokenizer\.json"):
        asyncio.run(start(whole))


@pytest.mark.parametrize(
    ("key", "value", "word"),
    [
        ("intermediate_size", 95, r"gate_proj.*\(96, 48\).*\(95, 48\)"),
        ("num_hidden_layers", 4, r"layers\.3.*missing"),
        ("architectures", ["GPT2LMHeadModel"], "GPT2LMHeadModel"),
    ],
)
def test_a_config_that_is_not_that_of_the_weights(key: str, value: Any, word: str, tmp_path: Path) -> None:
    config = build(tmp_path) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {key: value}))

    async def check() -> None:
        async with started(tmp_path):
            pass

    with pytest.raises(WeirError, match=word):
        asyncio.run(check())


@pytest.mark.parametrize("seed", range(3))
def test_any_coming_and_going_leaves_nothing_and_changes_no_token(seed: int, folder: Path) -> None:
    dice = Random(seed)
    asked = [(prompt(dice.randrange(99), dice.randrange(1, 50)), dice.randrange(1, 40)) for _ in range(14)]
    leaves = [dice.randrange(12) if dice.random() < 0.4 else None for _ in asked]

    async def one(engine: Engine, index: int) -> None:
        (ids, count), leave = asked[index], leaves[index]
        found: list[int] = []
        for _ in range(dice.randrange(20)):
            await asyncio.sleep(0)
        async with aclosing(engine.generate(request(ids, count))) as made:
            if leave == 0:
                return
            async for token in made:
                found.append(token.token_id)
                if len(found) == leave:
                    break
        assert found == greedy(folder, ids, count)[: leave or count]

    async def check() -> None:
        async with started(folder, block=3, kv_tokens=150, chunk=11, max_sequences=5) as engine:
            async with asyncio.TaskGroup() as group:
                for index in range(len(asked)):
                    group.create_task(one(engine, index))
            await until(lambda: at_zero(engine))
            await engine.sleep()
            await engine.wake()
            assert at_zero(engine)

    asyncio.run(check())
