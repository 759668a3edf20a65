"""The echo engine: what it says follows from the request alone, its price is kept, its slots come back."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regions.cli.errors import UsageError
from services.engine import Engine, FinishReason, GenerateRequest, Token
from services.engines import make_engine
from services.engines.echo import EchoEngine, EchoOptions, EngineDied, fails, parse
from tests.virtual import run

ASK = GenerateRequest("r", "over the weir", max_tokens=8, seed=3)


async def started(**options: float) -> EchoEngine:
    engine = EchoEngine(EchoOptions(**options))  # type: ignore[arg-type]
    await engine.start()
    return engine


async def said(engine: EchoEngine, ask: GenerateRequest) -> list[Token]:
    return [token async for token in engine.generate(ask)]


def once(ask: GenerateRequest, **options: float) -> list[Token]:
    async def main() -> list[Token]:
        return await said(await started(**options), ask)

    return run(main())


@settings(deadline=None, max_examples=40)
@given(prompt=st.text(min_size=1), seed=st.integers(), size=st.integers(1, 100))
def test_tokens_follow_from_prompt_and_seed_and_nothing_else(prompt: str, seed: int, size: int) -> None:
    ask = GenerateRequest("a", prompt, size, seed)
    other = dataclasses.replace(ask, request_id="b", max_tokens=size + 5, temperature=1.5)

    async def main() -> tuple[list[Token], list[Token]]:
        busy = await started(slots=1)
        await said(busy, GenerateRequest("x", "something before", 7))
        return await said(busy, ask), await said(await started(token_cost_ms=3.0), other)

    short, long = run(main())
    assert len(short) == size
    assert len(long) == size + 5
    assert [(t.token_id, t.text) for t in short] == [(t.token_id, t.text) for t in long[:size]]
    assert [t.finish for t in short] == [None] * (size - 1) + [FinishReason.LENGTH]


def test_another_seed_or_prompt_says_something_else() -> None:
    base = [t.text for t in once(ASK)]
    assert base != [t.text for t in once(dataclasses.replace(ASK, seed=4))]
    assert base != [t.text for t in once(dataclasses.replace(ASK, prompt="under the weir"))]


def test_a_lone_surrogate_in_the_prompt_is_only_a_prompt() -> None:
    assert len(once(dataclasses.replace(ASK, prompt="\ud800"))) == 8


def test_the_price_is_prefill_plus_tokens() -> None:
    async def main() -> float:
        engine = await started(token_cost_ms=10, prefill_ms_per_1000=1000)
        await said(engine, dataclasses.replace(ASK, prompt="x" * 400, max_tokens=20))
        return asyncio.get_running_loop().time()

    assert run(main()) == pytest.approx(0.1 + 0.2)


def test_slots_bound_how_many_run_and_stats_say_so() -> None:
    async def main() -> None:
        engine = await started(slots=2, token_cost_ms=10, kv_tokens=100)
        work = [asyncio.create_task(said(engine, ASK)) for _ in range(5)]
        await asyncio.sleep(0.005)
        stats = engine.stats()
        assert (stats.running, stats.waiting) == (2, 3)
        assert stats.kv_used == pytest.approx(2 * 4 / 100)
        await asyncio.gather(*work)
        assert asyncio.get_running_loop().time() == pytest.approx(3 * 8 * 0.010)
        stats = engine.stats()
        assert (stats.running, stats.waiting, stats.kv_used, stats.tokens) == (0, 0, 0.0, 40)

    run(main())


def test_closing_the_iterator_frees_the_slot_at_once() -> None:
    async def main() -> None:
        engine = await started(slots=1, token_cost_ms=10)
        async with contextlib.aclosing(engine.generate(ASK)) as tokens:
            await anext(tokens)
            assert engine.stats().running == 1
        stats = engine.stats()
        assert (stats.running, stats.waiting, stats.kv_used) == (0, 0, 0.0)
        assert len(await said(engine, ASK)) == 8

    run(main())


def test_cancelled_while_waiting_leaves_no_trace() -> None:
    async def main() -> None:
        engine = await started(slots=1, hang_after=0)
        first = asyncio.create_task(said(engine, ASK))
        second = asyncio.create_task(said(engine, ASK))
        await asyncio.sleep(0.01)
        assert (engine.stats().running, engine.stats().waiting) == (1, 1)
        second.cancel()
        await asyncio.wait((second,))
        assert (engine.stats().running, engine.stats().waiting) == (1, 0)
        first.cancel()
        await asyncio.wait((first,))
        assert engine.stats().running == 0

    run(main())


def test_a_stop_string_ends_it_even_across_tokens() -> None:
    words = [t.text for t in once(ASK)]
    stop = words[1][-1] + words[2][:3]
    tokens = once(dataclasses.replace(ASK, stop=(stop,)))
    assert len(tokens) == 3
    assert tokens[-1].finish is FinishReason.STOP


def test_free_tokens_let_others_have_a_turn() -> None:
    async def main() -> int:
        engine = await started()
        work = asyncio.create_task(said(engine, dataclasses.replace(ASK, max_tokens=10_000)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        seen = engine.stats().tokens
        await work
        return seen

    assert 0 < run(main()) < 10_000


def test_sleep_only_when_idle_and_the_same_tokens_after_waking() -> None:
    async def main() -> None:
        engine = await started(token_cost_ms=1)
        before = await said(engine, ASK)
        running = asyncio.create_task(said(engine, ASK))
        await asyncio.sleep(0.002)
        with pytest.raises(RuntimeError, match="running"):
            await engine.sleep()
        await running
        await engine.sleep()
        with pytest.raises(RuntimeError, match="sleeps"):
            await said(engine, ASK)
        await engine.wake()
        assert await said(engine, ASK) == before

    run(main())


def test_started_once() -> None:
    async def main() -> None:
        engine = EchoEngine(EchoOptions())
        with pytest.raises(RuntimeError, match="not started"):
            await said(engine, ASK)
        await engine.start()
        with pytest.raises(RuntimeError, match="already"):
            await engine.start()

    run(main())


def test_a_death_takes_the_others_along_and_stays() -> None:
    async def main() -> None:
        engine = await started(token_cost_ms=10, die_after=4)
        first = asyncio.create_task(said(engine, ASK))
        await asyncio.sleep(0.025)
        second = asyncio.create_task(said(engine, ASK))
        ends = await asyncio.gather(first, second, return_exceptions=True)
        assert [type(end) for end in ends] == [EngineDied, EngineDied]
        assert engine.stats().dead
        assert engine.stats().running == 0
        with pytest.raises(EngineDied):
            await said(engine, ASK)

    run(main())


@given(seed=st.integers(0, 2**63), number=st.integers(0, 10**9))
def test_no_rate_fails_nothing_and_full_rate_everything(seed: int, number: int) -> None:
    assert not fails(seed, number, 0.0)
    assert fails(seed, number, 1.0)


def test_the_fail_rate_is_kept_and_seeded() -> None:
    hit = [n for n in range(4000) if fails(7, n, 0.1)]
    assert 300 < len(hit) < 500
    assert hit == [n for n in range(4000) if fails(7, n, 0.1)]
    assert hit != [n for n in range(4000) if fails(8, n, 0.1)]


BAD = "token_cost_ms=-1 token_cost_ms=nan token_cost_ms=inf fail_rate=1.5 slots=1.5 kv_tokens=0 hang_after=-2"


@pytest.mark.parametrize("option", [*BAD.split(), "hang_after=", "prise=1"])
def test_bad_options_are_named(option: str) -> None:
    name, _, text = option.partition("=")
    with pytest.raises(UsageError, match=name):
        parse({name: text})


def test_engines_are_found_by_name() -> None:
    engine = make_engine("echo", {"token_cost_ms": "0"})
    assert isinstance(engine, Engine)
    with pytest.raises(UsageError, match=r"vllm9.*unknown"):
        make_engine("vllm9", {})
