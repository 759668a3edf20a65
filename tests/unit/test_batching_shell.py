"""The scheduler over an engine that is well: who goes when, what a place costs, what is refused."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses

import pytest

from services.engine import Engine, FinishReason, GenerateRequest
from services.engines.sim import SimEngine
from services.faults import DeadlinePassed, EngineDied, EngineFault, Refused
from services.sim_cost import SimOptions
from tests.fakes.loop_clock import LoopClock
from tests.unit.scheduled import (
    ASK,
    PLAIN,
    STATIC,
    cancelled,
    empty,
    ended,
    made,
    now,
    said,
    with_class,
)
from tests.virtual import run


def test_it_is_an_engine_and_says_what_the_inner_one_says() -> None:
    async def main() -> None:
        engine, inner = await made()
        assert isinstance(engine, Engine)
        assert engine.facts() == inner.facts()
        assert engine.size(ASK) == inner.size(ASK)
        direct = SimEngine(PLAIN, clock=LoopClock())
        await direct.start()
        assert await said(engine) == await said(direct)
        assert empty(engine)
        await engine.close()
        await engine.close()

    run(main())


def test_a_lone_request_pays_no_delay_on_either_kind_of_engine() -> None:
    async def main(options: SimOptions) -> None:
        engine, _ = await made(options, max_delay_ms=50)
        for _ in range(3):
            start = now()
            assert await ended(engine) == pytest.approx(start + 0.080)

    run(main(PLAIN))
    run(main(STATIC))


def test_a_place_that_comes_free_is_the_next_ones_at_once() -> None:
    async def main() -> None:
        engine, _ = await made(dataclasses.replace(PLAIN, slots=2))
        long = dataclasses.replace(ASK, max_tokens=30)
        ends = await asyncio.gather(ended(engine, long), ended(engine), ended(engine), ended(engine))
        assert ends == pytest.approx([0.300, 0.080, 0.160, 0.240])

    run(main())


def test_a_static_engine_gets_a_batch_when_it_is_full_or_its_oldest_waited_long_enough() -> None:
    async def main() -> None:
        engine, _ = await made(STATIC, batch_size=4, concurrency=3, max_delay_ms=50)
        # The first goes alone, since nothing runs; a static sim engine itself then lets none in until 0.080.
        first = asyncio.create_task(said(engine))
        await asyncio.sleep(0.005)
        others = [asyncio.create_task(said(engine)) for _ in range(3)]
        await asyncio.sleep(0.049)
        assert engine.counts().running == 1
        await asyncio.sleep(0.002)
        assert engine.counts().running == 4  # by delay
        full = [asyncio.create_task(said(engine)) for _ in range(4)]
        await asyncio.sleep(0.001)
        assert engine.counts().running == 8  # by size
        late = asyncio.create_task(said(engine))
        await asyncio.sleep(0.005)
        assert engine.counts().queued == 1  # the lanes are taken
        await asyncio.gather(first, *others, *full, late)
        assert empty(engine)

    run(main())


def test_gold_goes_before_silver_before_the_rest_and_nobody_waits_for_ever() -> None:
    async def main() -> None:
        engine, _ = await made(dataclasses.replace(PLAIN, slots=1), ageing_s=1)
        order: list[str] = []

        async def one(name: str, label: str) -> None:
            await said(engine, with_class(name))
            order.append(label)

        work = [asyncio.create_task(one("", "running"))]
        for name, label in (("", "rest"), ("silver", "s1"), ("gold", "g1"), ("silver", "s2"), ("gold", "g2")):
            await asyncio.sleep(0.001)
            work.append(asyncio.create_task(one(name, label)))
        await asyncio.sleep(0.001)
        assert dict(engine.counts().queue_by_class) == {"gold": 2, "silver": 2, "other": 1}
        await asyncio.gather(*work)
        assert order == ["running", "g1", "g2", "s1", "s2", "rest"]

        order.clear()
        work = [asyncio.create_task(one("", "running")), asyncio.create_task(one("", "rest"))]
        for n in range(40):  # gold for three seconds, each as soon as the last is under way
            await asyncio.sleep(0.080)
            work.append(asyncio.create_task(one("gold", f"g{n}")))
        await asyncio.gather(*work)
        assert 20 <= order.index("rest") < 30  # after about two seconds, the worth of two classes

    run(main())


def test_who_is_cancelled_in_the_queue_or_while_it_runs_leaves_nothing() -> None:
    async def main() -> None:
        engine, inner = await made(dataclasses.replace(PLAIN, slots=1))
        running, queued, last = (asyncio.create_task(said(engine)) for _ in range(3))
        await asyncio.sleep(0.025)
        assert (engine.counts().running, engine.counts().queued) == (1, 2)
        await cancelled(queued)
        assert (engine.counts().running, engine.counts().queued) == (1, 1)
        await cancelled(running)
        assert (engine.counts().running, inner.stats().running) == (1, 0)  # the last one's place now
        assert len(await last) == 8
        assert empty(engine)

    run(main())


def test_closing_the_iterator_at_any_token_gives_place_and_kv_back() -> None:
    async def main() -> None:
        engine, _ = await made()
        for taken in range(9):
            tokens = engine.generate(ASK)
            for _ in range(taken):
                await anext(tokens)
            await tokens.aclose()
            assert empty(engine)

    run(main())


def test_the_last_token_frees_the_place_though_its_reader_is_slow() -> None:
    async def main() -> None:
        engine, _ = await made(dataclasses.replace(PLAIN, slots=1))
        tokens = engine.generate(dataclasses.replace(ASK, max_tokens=1))
        assert (await anext(tokens)).finish is FinishReason.LENGTH
        assert empty(engine)
        assert len(await said(engine)) == 8
        await tokens.aclose()

    run(main())


def test_a_deadline_passes_in_the_queue() -> None:
    async def main() -> None:
        engine, _ = await made(dataclasses.replace(PLAIN, slots=1))
        running = asyncio.create_task(said(engine, dataclasses.replace(ASK, max_tokens=100)))
        await asyncio.sleep(0)
        with pytest.raises(DeadlinePassed, match="queue"):
            await said(engine, dataclasses.replace(ASK, deadline_s=0.2))
        assert now() == pytest.approx(0.2)
        assert (engine.counts().queued, engine.counts().deadline_misses) == (0, 1)
        with pytest.raises(DeadlinePassed):
            await said(engine, dataclasses.replace(ASK, deadline_s=0.0))
        await running
        assert empty(engine)

    run(main())


def test_a_full_queue_says_429_and_when_to_come_again() -> None:
    async def main() -> None:
        engine, _ = await made(dataclasses.replace(PLAIN, slots=2), queue_limit=4)
        for _ in range(50):  # 25 a second, for two seconds
            await asyncio.gather(said(engine), said(engine))
        work = [asyncio.create_task(said(engine)) for _ in range(6)]
        await asyncio.sleep(0)
        with pytest.raises(Refused) as refused:
            await said(engine)
        assert (refused.value.status, refused.value.code) == (429, "queue_full")
        assert refused.value.retry_after_s == pytest.approx(5 / 25, rel=0.2)
        assert engine.counts().refusals == {"queue_full": 1}
        await asyncio.gather(*work)
        assert empty(engine)

    run(main())


def test_what_never_fits_is_refused_and_what_fits_later_waits() -> None:
    async def main() -> None:
        engine, inner = await made(SimOptions(context=400, kv_tokens=160, kv_block=16, step_ms=10))
        with pytest.raises(Refused) as refused:
            await said(engine, dataclasses.replace(ASK, max_tokens=397))
        assert (refused.value.status, refused.value.code) == (400, "context_length_exceeded")
        with pytest.raises(Refused) as refused:
            await said(engine, dataclasses.replace(ASK, max_tokens=180))
        assert (refused.value.status, refused.value.code) == (400, "kv_never_fits")
        assert inner.stats().prompt_tokens == 0
        big = dataclasses.replace(ASK, max_tokens=90)  # six of ten blocks
        work = [asyncio.create_task(said(engine, big)) for _ in range(3)]
        await asyncio.sleep(0.025)
        assert (engine.counts().running, engine.counts().queued, engine.counts().kv_blocks) == (1, 2, 6)
        assert inner.stats().waiting == 0
        assert [len(tokens) for tokens in await asyncio.gather(*work)] == [90, 90, 90]
        assert empty(engine)

    run(main())


def test_it_sleeps_only_when_nothing_runs_or_waits() -> None:
    async def main() -> None:
        engine, inner = await made(dataclasses.replace(PLAIN, wake_fails=1))
        work = asyncio.create_task(said(engine))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="sleep"):
            await engine.sleep()
        before = await work
        await engine.sleep()
        with pytest.raises(Refused) as refused:
            await said(engine)
        assert (refused.value.status, refused.value.code) == (503, "asleep")
        with pytest.raises(EngineFault):
            await engine.wake()
        with pytest.raises(Refused):
            await said(engine)
        await engine.wake()
        assert await said(engine) == before
        assert inner.stats().running == 0

    run(main())


def test_closing_ends_all_who_wait_and_all_who_run() -> None:
    async def main() -> None:
        engine, _ = await made(dataclasses.replace(PLAIN, slots=1))
        work = [asyncio.create_task(said(engine)) for _ in range(3)]
        await asyncio.sleep(0.025)
        await engine.close()
        ends = await asyncio.gather(*work, return_exceptions=True)
        assert [type(end) for end in ends] == [EngineDied] * 3
        assert empty(engine)
        await engine.start()
        assert len(await said(engine)) == 8

    run(main())


def test_a_jump_of_the_wall_clock_changes_nothing() -> None:
    async def main(jump: float) -> list[float]:
        clock = LoopClock()
        engine, _ = await made(dataclasses.replace(PLAIN, slots=2), clock, idle_s=1, first_token_s=1)

        async def end(ask: GenerateRequest) -> float:
            with contextlib.suppress(EngineFault):
                await said(engine, ask)
            return now()

        asks = [dataclasses.replace(ASK, deadline_s=0.2, max_tokens=n) for n in (8, 30, 12, 9, 5)]
        work = [asyncio.create_task(end(ask)) for ask in asks]
        await asyncio.sleep(0.015)
        clock.epoch_s += jump
        return await asyncio.gather(*work)

    assert run(main(0)) == run(main(-86_400)) == run(main(1e9))


def test_numbers_for_telemetry() -> None:
    async def main() -> None:
        engine, _ = await made(dataclasses.replace(PLAIN, slots=1))
        await asyncio.gather(said(engine), said(engine))
        counts = engine.counts()
        assert (counts.submitted, counts.placed, counts.finished, counts.waits) == (2, 2, 2, 2)
        assert counts.wait_s == pytest.approx(0.080)
        assert (counts.wait_buckets[0], counts.wait_buckets[-1]) == (1, 2)
        assert engine.stats().extra["batching_queued"] == 0

    run(main())
