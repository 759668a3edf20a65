"""The sim engine: what it says follows from the request, its price list is kept, its faults come on order."""

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
from services.engines.sim import SimEngine
from services.faults import (
    BadLogits,
    DeviceLost,
    EngineDied,
    EngineFault,
    OutOfDeviceMemory,
    Refused,
    WakeFailed,
)
from services.sim_cost import SimOptions, fails, limit_tokens_s, parse, step_s
from tests.fakes.loop_clock import LoopClock
from tests.virtual import run

ASK = GenerateRequest("r", "over the weir", max_tokens=8, seed=3)
PROMPT_TOKENS = 4
PLAIN = SimOptions(prefill_ms_per_token=0, step_ms=10, seq_ms=0)


async def started(options: SimOptions = PLAIN) -> SimEngine:
    engine = SimEngine(options, clock=LoopClock())
    await engine.start()
    return engine


async def said(engine: SimEngine, ask: GenerateRequest = ASK) -> list[Token]:
    return [token async for token in engine.generate(ask)]


def now() -> float:
    return asyncio.get_running_loop().time()


@settings(deadline=None, max_examples=30)
@given(prompt=st.text(min_size=1, max_size=60), seed=st.integers(), length=st.integers(1, 40))
def test_tokens_follow_from_the_request_and_nothing_else(prompt: str, seed: int, length: int) -> None:
    ask = GenerateRequest("a", prompt, length, seed)
    other = dataclasses.replace(ask, request_id="b", max_tokens=length + 5, temperature=1.5)

    async def main() -> tuple[list[Token], list[Token]]:
        busy = await started(dataclasses.replace(PLAIN, slots=2))
        _, tokens, _ = await asyncio.gather(said(busy), said(busy, ask), said(busy))
        return tokens, await said(await started(SimOptions(speed=3)), other)

    short, long = run(main())
    assert [(t.token_id, t.text) for t in short] == [(t.token_id, t.text) for t in long[:length]]
    assert [t.finish for t in short] == [None] * (length - 1) + [FinishReason.LENGTH]
    assert {t.engine for t in short} == {"sim"}


@pytest.mark.parametrize(
    "change", [{"seed": 4}, {"prompt": "under it"}, {"sample": 1}, {"prompt_ids": (1, 2)}]
)
def test_another_prompt_seed_or_sample_says_something_else(change: dict[str, object]) -> None:
    async def main() -> bool:
        engine = await started()
        other = await said(engine, dataclasses.replace(ASK, **change))  # type: ignore[arg-type]
        return [t.text for t in await said(engine)] == [t.text for t in other]

    assert not run(main())


def test_size_counts_ids_as_they_are_and_text_by_four() -> None:
    engine = SimEngine(SimOptions())
    assert isinstance(engine, Engine)
    assert engine.size(ASK) == PROMPT_TOKENS
    assert engine.size(dataclasses.replace(ASK, prompt="")) == 1
    assert engine.size(dataclasses.replace(ASK, prompt_ids=(7,) * 9)) == 9


def test_a_step_costs_what_the_list_says() -> None:
    o = SimOptions(step_ms=4, seq_ms=0.5, prefill_ms_per_token=0.1, speed=2)
    assert step_s(o, 8, 100, 0.0) == pytest.approx((4 + 4 + 10) / 1000 / 2)
    assert limit_tokens_s(dataclasses.replace(o, slots=8)) == pytest.approx(8 / 0.004)


def test_all_running_sequences_get_a_token_each_step() -> None:
    async def main() -> None:
        engine = await started(SimOptions(step_ms=10, seq_ms=1, prefill_ms_per_token=0.5))
        await asyncio.gather(said(engine), said(engine), said(engine))
        assert now() == pytest.approx((3 * PROMPT_TOKENS * 0.5 + 8 * (10 + 3)) / 1000)
        assert engine.stats().tokens == 24
        assert engine.stats().extra["steps"] == 8

    run(main())


def test_who_finds_no_slot_or_no_kv_waits() -> None:
    async def main() -> None:
        slots = await started(dataclasses.replace(PLAIN, slots=2))
        cache = await started(dataclasses.replace(PLAIN, kv_tokens=47, kv_block=12))  # three blocks, one each
        for engine, most in ((slots, 2), (cache, 3)):
            work = [asyncio.create_task(said(engine)) for _ in range(5)]
            await asyncio.sleep(0.005)
            stats = engine.stats()
            assert (stats.running, stats.waiting) == (most, 5 - most)
            await asyncio.gather(*work)
            stats = engine.stats()
            assert (stats.running, stats.waiting, stats.kv_used, stats.tokens) == (0, 0, 0.0, 40)
        assert cache.facts().kv_tokens == 36

    run(main())


def test_a_place_is_taken_over_in_the_next_step_unless_batches_are_static() -> None:
    long = dataclasses.replace(ASK, max_tokens=20)

    async def main(continuous: int) -> float:
        engine = await started(dataclasses.replace(PLAIN, slots=2, continuous=continuous))
        work = [asyncio.create_task(said(engine, ask)) for ask in (long, ASK, ASK)]
        await work[2]
        at = now()
        await asyncio.gather(*work)
        return at

    assert run(main(1)) == pytest.approx(0.160)
    assert run(main(0)) == pytest.approx(0.280)


def test_what_never_fits_is_refused_before_work() -> None:
    async def main() -> None:
        engine = await started(SimOptions(context=100, kv_tokens=32))
        with pytest.raises(Refused) as refused:
            await said(engine, dataclasses.replace(ASK, max_tokens=97))
        assert (refused.value.status, refused.value.code) == (400, "context_length_exceeded")
        with pytest.raises(Refused) as refused:
            await said(engine, dataclasses.replace(ASK, max_tokens=29))
        assert (refused.value.status, refused.value.code) == (400, "kv_never_fits")
        assert engine.stats().prompt_tokens == 0

    run(main())


def test_closing_the_iterator_frees_slot_and_kv_at_once_in_every_phase() -> None:
    async def main() -> None:
        engine = await started(dataclasses.replace(PLAIN, slots=1))
        async with contextlib.aclosing(engine.generate(ASK)) as tokens:
            await anext(tokens)
            waiting = asyncio.create_task(said(engine))
            await asyncio.sleep(0.001)
            assert (engine.stats().running, engine.stats().waiting) == (1, 1)
            waiting.cancel()
            await asyncio.wait((waiting,))
            assert engine.stats().waiting == 0
        assert (engine.stats().running, engine.stats().kv_used) == (0, 0.0)
        assert len(await said(engine)) == 8

    run(main())


def test_a_stop_string_ends_it_even_across_tokens_and_eos_by_itself() -> None:
    async def main() -> None:
        engine = await started(dataclasses.replace(PLAIN, eos_mean=10))
        words = [t.text for t in await said(engine, dataclasses.replace(ASK, ignore_eos=True))]
        stop = words[1][-1] + words[2][:3]
        tokens = await said(engine, dataclasses.replace(ASK, stop=(stop,), ignore_eos=True))
        assert len(tokens) == 3
        assert tokens[-1].finish is FinishReason.STOP
        lengths = [
            len(await said(engine, dataclasses.replace(ASK, seed=n, max_tokens=500))) for n in range(400)
        ]
        assert 8 < sum(lengths) / len(lengths) < 12

    run(main())


FAULTS: list[tuple[dict[str, int], type[EngineFault], int]] = [
    ({"nan_after": 3}, BadLogits, 3),
    ({"die_after": 2}, EngineDied, 2),
    ({"oom_at_step": 5}, OutOfDeviceMemory, 5),
    ({"lost_at_step": 4}, DeviceLost, 4),
    ({"fail_first": 1}, EngineFault, 0),
]


@pytest.mark.parametrize(("order", "kind", "tokens_before"), FAULTS)
def test_faults_come_on_order_and_leave_no_trace(
    order: dict[str, int], kind: type[EngineFault], tokens_before: int
) -> None:
    async def main() -> None:
        engine = await started(dataclasses.replace(PLAIN, **order))  # type: ignore[arg-type]
        seen = []
        fault: EngineFault | None = None
        try:
            async for token in engine.generate(ASK):
                seen.append(token)
        except EngineFault as error:
            fault = error
        assert type(fault) is kind
        assert len(seen) == tokens_before
        stats = engine.stats()
        assert (stats.running, stats.waiting, stats.kv_used) == (0, 0, 0.0)
        assert bool(stats.dead) == issubclass(kind, EngineDied)
        if stats.dead:
            with pytest.raises(EngineDied):
                await said(engine)
        elif kind is not BadLogits:
            assert len(await said(engine)) == 8

    run(main())


def test_a_dead_engine_takes_all_along_those_who_wait_too() -> None:
    async def main() -> None:
        engine = await started(dataclasses.replace(PLAIN, slots=2, die_after=4))
        ends = await asyncio.gather(*(said(engine) for _ in range(4)), return_exceptions=True)
        assert [type(end) for end in ends] == [EngineDied] * 4

    run(main())


def test_a_hung_sequence_holds_its_slot_and_harms_no_other() -> None:
    async def main() -> None:
        engine = await started(dataclasses.replace(PLAIN, slots=2, hang_after=6))
        hung = asyncio.create_task(said(engine))
        short = dataclasses.replace(ASK, max_tokens=5)
        assert len(await said(engine, short)) == 5
        await asyncio.sleep(10)
        assert not hung.done()
        assert engine.stats().running == 1
        hung.cancel()
        await asyncio.wait((hung,))
        assert engine.stats().running == 0

    run(main())


def test_a_slot_that_a_hung_one_gives_back_serves_who_waits() -> None:
    async def main() -> None:
        engine = await started(dataclasses.replace(PLAIN, slots=1, hang_after=6))
        hung = asyncio.create_task(said(engine))
        await asyncio.sleep(1)
        waiting = asyncio.create_task(said(engine, dataclasses.replace(ASK, max_tokens=5)))
        await asyncio.sleep(1)
        hung.cancel()
        assert len(await waiting) == 5

    run(main())


def test_slow_for_a_while_and_only_above_a_batch() -> None:
    slow = SimOptions(slow_from_s=1, slow_to_s=2, slow_factor=4, slow_batch=3)
    usual = step_s(slow, 3, 0, 0.5)
    assert [step_s(slow, 3, 0, age) / usual for age in (0.5, 1.0, 1.9, 2.0)] == pytest.approx([1, 4, 4, 1])
    assert step_s(slow, 2, 0, 1.5) < usual


def test_sleep_gives_memory_back_and_waking_brings_the_same_tokens() -> None:
    async def main() -> None:
        engine = await started(
            dataclasses.replace(PLAIN, weights_bytes=1000, kv_bytes_per_token=1, kv_tokens=48, leak_bytes=5)
        )
        before = await said(engine)
        assert engine.stats().memory_bytes == 1048
        work = asyncio.create_task(said(engine))
        await asyncio.sleep(0.001)
        with pytest.raises(RuntimeError, match="running"):
            await engine.sleep()
        await work
        await engine.sleep(2)
        assert engine.stats().memory_bytes == 5
        with pytest.raises(RuntimeError, match="sleeps"):
            await said(engine)
        await engine.wake()
        assert await said(engine) == before

    run(main())


def test_a_wake_fails_on_order_then_brings_garbage_then_is_good() -> None:
    async def main() -> None:
        engine = await started(dataclasses.replace(PLAIN, wake_fails=1, wake_garbage=1))
        before = await said(engine)
        await engine.sleep()
        with pytest.raises(WakeFailed):
            await engine.wake()
        with pytest.raises(RuntimeError, match="sleeps"):
            await said(engine)
        await engine.wake()
        assert await said(engine) != before
        await engine.sleep()
        await engine.wake()
        assert await said(engine) == before

    run(main())


def test_started_once_closed_twice_and_started_again() -> None:
    async def main() -> None:
        engine = SimEngine(dataclasses.replace(PLAIN, hang_after=0), clock=LoopClock())
        await engine.close()
        await engine.start()
        with pytest.raises(RuntimeError, match="already"):
            await engine.start()
        reader = asyncio.create_task(said(engine))
        await asyncio.sleep(0.001)
        await engine.close()
        await engine.close()
        with pytest.raises(EngineDied, match="closed"):
            await reader
        await engine.start()
        assert not engine.stats().dead

    run(main())


def test_the_fail_rate_is_kept_and_seeded() -> None:
    def hits(seed: int) -> list[int]:
        return [n for n in range(1, 4001) if fails(SimOptions(fail_rate=0.1, fault_seed=seed), n)]

    assert 300 < len(hits(7)) < 500
    assert hits(7) == hits(7)
    assert hits(7) != hits(8)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"slot": "1"}, "unknown"),
        ({"slots": "x"}, "number"),
        ({"slots": "0"}, "range"),
        ({"speed": "nan"}, "range"),
    ],
)
def test_a_bad_option_is_named(options: dict[str, str], why: str) -> None:
    with pytest.raises(UsageError) as error:
        make_engine("sim", options)
    assert next(iter(options)) in str(error.value)
    assert why in str(error.value)


def test_options_are_read_from_text() -> None:
    assert parse({"slots": "7", "step_ms": "2.5"}) == SimOptions(slots=7, step_ms=2.5)
