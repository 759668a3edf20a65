"""S14 as it is put together for the torch engine: the paged engine, and its own weights layer by layer.

A tiny random model; what counts is that both give the same tokens, and that memory and weights are shared.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from services.engine import FinishReason, GenerateRequest, Token
from services.fallback.engine import FallbackEngine
from services.fallback.rules import Reason, Rule
from services.faults import EngineFault

pytestmark = pytest.mark.torch

T = TypeVar("T")
RULES = (
    Rule(Reason.SEQUENCE_LENGTH, over=40, codes=("kv_never_fits", "context_length_exceeded")),
    Rule(Reason.ENGINE_ERROR),
    Rule(Reason.QUEUE_FULL, codes=("queue_full",)),
)
SHORT = GenerateRequest("short", "", 12, prompt_ids=tuple(range(3, 20)), ignore_eos=True)
LONG = replace(SHORT, request_id="long", max_tokens=24)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder as published: config.json, weights, tokenizer."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    from tests.bench.gpu_env import Env, now, random_weights
    from tests.bench.gpu_rows import TINY, Deadline
    from tests.bench.gpu_weights import write_model

    torch.set_num_threads(1)
    made = tmp_path_factory.mktemp("tiny")
    write_model(made, TINY, random_weights(Env(torch.device("cpu"), True, Deadline(now() + 60, now))))
    words = {f"w{index}": index for index in range(TINY["vocab_size"])}
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(made / "tokenizer.json"))
    return made


@pytest.fixture
def both(folder: Path) -> FallbackEngine:
    return make(folder)


def make(folder: Path, **options: str) -> FallbackEngine:
    from services.engines.torch import make as make_torch
    from services.llama.engine import TorchEngine
    from services.llama.layerwise import LayerwiseEngine

    engine = make_torch(str(folder), {"device": "cpu", "threads": "1", **options})
    assert isinstance(engine, TorchEngine)
    return FallbackEngine(engine, LayerwiseEngine(engine), RULES, shared=True)


def run(main: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(main, 60))


async def said(engine: FallbackEngine, ask: GenerateRequest) -> list[Token]:
    async with aclosing(engine.generate(ask)) as tokens:
        return [token async for token in tokens]


def ids(tokens: list[Token]) -> list[int]:
    return [token.token_id for token in tokens]


def test_both_engines_give_the_same_tokens_and_say_who_they_are(both: FallbackEngine) -> None:
    async def main() -> None:
        await both.start()
        try:
            short, long = await said(both, SHORT), await said(both, LONG)
            assert {t.engine for t in short} == {"torch"}
            assert {t.engine for t in long} == {"torch-layerwise"}
            assert (both.reason_of("short"), both.reason_of("long")) == ("", "sequence_length")
            assert ids(long)[:12] == ids(short)
            assert long[-1].finish is FinishReason.LENGTH
            assert both.stats().running == 0
        finally:
            await both.close()

    run(main())


def test_weights_are_shared_and_counted_once(both: FallbackEngine) -> None:
    async def main() -> None:
        await both.start()
        try:
            primary, secondary = both.parts
            assert both.facts().weights_bytes == primary.facts().weights_bytes > 0
            assert both.stats().memory_bytes == primary.stats().memory_bytes
            assert both.facts().model == secondary.facts().model
        finally:
            await both.close()

    run(main())


def test_asleep_together_and_the_same_tokens_afterwards(both: FallbackEngine) -> None:
    async def main() -> None:
        await both.start()
        try:
            before = ids(await said(both, SHORT)), ids(await said(both, LONG))
            for level in both.facts().sleep_levels:
                await both.sleep(level)
                assert both.stats().memory_bytes == 0
                with pytest.raises(RuntimeError):
                    await said(both, SHORT)
                await both.wake()
                assert (ids(await said(both, SHORT)), ids(await said(both, LONG))) == before
        finally:
            await both.close()

    run(main())


def test_a_failing_step_of_the_primary_is_answered_layer_by_layer(
    both: FallbackEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN logits in the paged engine before its first token."""
    from services.llama import cached

    async def main() -> None:
        await both.start()
        try:
            right = ids(await said(both, SHORT))
            plain = cached.choose
            monkeypatch.setattr(
                cached, "choose", lambda logits, *more: plain(logits.fill_(float("nan")), *more)
            )
            tokens = await said(both, replace(SHORT, request_id="ill"))
            assert {t.engine for t in tokens} == {"torch-layerwise"}
            assert ids(tokens) == right
            assert both.reason_of("ill") == "engine_error"
            with pytest.raises(EngineFault):
                await said(both.parts[0], SHORT)  # type: ignore[arg-type]
        finally:
            await both.close()

    run(main())


def test_what_the_pool_can_never_hold_runs_without_one(folder: Path) -> None:
    async def main() -> None:
        both = make(folder, kv_tokens="16")
        await both.start()
        try:
            tokens = await said(both, SHORT)
            assert {t.engine for t in tokens} == {"torch-layerwise"}
            assert both.reason_of("short") == "sequence_length"
        finally:
            await both.close()

    run(main())
