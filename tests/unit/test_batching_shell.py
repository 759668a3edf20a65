"""The scheduler around an engine, in virtual time: triggers, order, ends of every kind, nothing left over."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator
from random import Random
from typing import Any

import pytest

from services.batching import BatchingSettings, Scheduled
from services.batching.scheduled import STUCK
from services.engine import Engine, FinishReason, GenerateRequest, Token
from services.engines.sim import SimEngine
from services.faults import DeadlinePassed, DeviceLost, EngineDied, EngineFault, EngineHung, Refused
from services.sim_cost import SimOptions
from tests.fakes.loop_clock import LoopClock
from tests.virtual import run

PLAIN = SimOptions(prefill_ms_per_token=0, step_ms=10, seq_ms=0)
STATIC = dataclasses.replace(PLAIN, continuous=0, slots=1000)
ASK = GenerateRequest("r", "over the weir", max_tokens=8, seed=3)


async def made(
    options: SimOptions = PLAIN, clock: LoopClock | None = None, **settings: Any
) -> tuple[Scheduled, SimEngine]:
    clock = clock or LoopClock()
    inner = SimEngine(options, clock=clock)
    engine = Scheduled(inner, BatchingSettings(**settings), clock, Random(7))
    await engine.start()
    return engine, inner


async def said(engine: Engine, ask: GenerateRequest = ASK) -> list[Token]:
    return [token async for token in engine.generate(ask)]


async def ended(engine: Engine, ask: GenerateRequest = ASK) -> float:
    """When the last token came."""
    await said(engine, ask)
    return now()


async def first_at(engine: Engine, ask: GenerateRequest = ASK) -> float:
    async with contextlib.aclosing(engine.generate(ask)) as tokens:
        await anext(tokens)
        return now()


def now() -> float:
    return asyncio.get_running_loop().time()


def with_class(name: str, **change: Any) -> GenerateRequest:
    return dataclasses.replace(ASK, tenant_class=name, **change)


def empty(engine: Scheduled) -> bool:
    """Nothing of any request is left, here or in the engine."""
    counts, stats = engine.counts(), engine.engine.stats()
    here = (
        counts.running,
        counts.queued,
        counts.backing_off,
        counts.kv_blocks,
        *counts.queue_by_class.values(),
    )
    return not any((*here, stats.running, stats.waiting, stats.kv_used))


async def cancelled(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


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


def test_a_deadline_passes_while_it_runs_also_behind_a_slow_readers_back() -> None:
    async def main() -> None:
        engine, _ = await made()
        late = dataclasses.replace(ASK, max_tokens=100, deadline_s=0.055)
        with pytest.raises(DeadlinePassed, match="ran"):
            await said(engine, late)
        assert now() == pytest.approx(0.055)
        assert empty(engine)

        slow = engine.generate(late)
        await anext(slow)
        await asyncio.sleep(1)
        assert empty(engine)  # nobody asked for the next token, and still the place is free
        with pytest.raises(DeadlinePassed):
            await anext(slow)
        assert engine.counts().deadline_misses == 2
        assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]

    run(main())


def test_a_request_that_fails_before_its_first_token_is_tried_again_after_a_pause() -> None:
    async def main() -> None:
        engine, _ = await made(
            dataclasses.replace(PLAIN, fail_first=2), backoff_base_s=0.1, backoff_factor=1.5, jitter=0.2
        )
        assert len(await said(engine)) == 8
        pauses = now() - 0.080
        assert 0.8 * (0.1 + 0.15) <= pauses <= 0.1 + 0.15
        assert engine.counts().retries == 2
        assert empty(engine)

    run(main())


def test_tries_end_and_the_fault_is_what_the_engine_said() -> None:
    async def main() -> None:
        engine, _ = await made(dataclasses.replace(PLAIN, fail_first=9), retries=2)
        with pytest.raises(EngineFault, match="request 3 fails"):
            await said(engine)
        assert engine.counts().retries == 2
        assert empty(engine)

    run(main())


def test_after_the_first_token_nothing_is_tried_again() -> None:
    async def main() -> None:
        engine, _ = await made(dataclasses.replace(PLAIN, nan_after=1))
        seen: list[Token] = []
        with contextlib.suppress(EngineFault):
            async for token in engine.generate(ASK):
                seen.append(token)
        assert len(seen) == 1
        assert engine.counts().retries == 0
        assert empty(engine)

    run(main())


def test_cancelled_or_late_between_two_tries_leaves_nothing() -> None:
    async def main() -> None:
        engine, _ = await made(dataclasses.replace(PLAIN, fail_first=9), backoff_base_s=2, jitter=0)
        task = asyncio.create_task(said(engine))
        await asyncio.sleep(0.5)
        assert engine.counts().backing_off == 1
        with pytest.raises(RuntimeError, match="sleep"):
            await engine.sleep()
        await cancelled(task)
        assert empty(engine)
        start = now()
        with pytest.raises(DeadlinePassed):
            await said(engine, dataclasses.replace(ASK, deadline_s=1))
        assert now() - start == pytest.approx(1)
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


@pytest.mark.parametrize(("hang_after", "limit"), [(0, 3.0), (4, 2.0)])
def test_silence_is_a_hang_before_the_first_token_and_after(hang_after: int, limit: float) -> None:
    async def main() -> None:
        engine, _ = await made(dataclasses.replace(PLAIN, hang_after=hang_after), first_token_s=3, idle_s=2)
        with pytest.raises(EngineHung):
            await said(engine)
        assert now() == pytest.approx(hang_after * 0.010 + limit)
        assert engine.counts().hangs == 1
        assert engine.counts().retries == 0
        assert empty(engine)

    run(main())


def test_an_engine_that_is_silent_to_everybody_is_dead_until_it_is_started_anew() -> None:
    """Else every new request would wait for its hang, and nobody would bring the engine back."""

    async def main() -> None:
        stuck = dataclasses.replace(PLAIN, hang_after=2, slots=STUCK)
        engine, _ = await made(stuck, first_token_s=3, idle_s=2)
        work = [asyncio.create_task(said(engine)) for _ in range(STUCK + 1)]
        ends = await asyncio.gather(*work, return_exceptions=True)
        assert [type(end) for end in ends] == [EngineHung] * STUCK + [EngineDied], "who waits hears it too"
        assert "stuck" in engine.stats().dead
        asked = now()
        with pytest.raises(EngineDied, match="stuck"):
            await said(engine)
        assert now() == asked, "at once"
        assert empty(engine)
        await engine.close()
        await engine.start()
        assert not engine.stats().dead

    run(main())


def test_sequences_that_hang_while_others_get_tokens_are_no_stuck_engine() -> None:
    async def main() -> None:
        engine, _ = await made(dataclasses.replace(PLAIN, hang_after=8), first_token_s=3, idle_s=2)
        for _ in range(2 * STUCK):
            with pytest.raises(EngineHung):
                await said(engine, dataclasses.replace(ASK, max_tokens=20))
            assert len(await said(engine)) == 8
        assert engine.counts().hangs == 2 * STUCK
        assert not engine.stats().dead

    run(main())


def test_a_slow_reader_is_no_hang() -> None:
    async def main() -> None:
        engine, _ = await made(first_token_s=3, idle_s=2)
        count = 0
        async for _ in engine.generate(ASK):
            await asyncio.sleep(30)
            count += 1
        assert count == 8
        assert engine.counts().hangs == 0

    run(main())


def test_a_cancellation_from_outside_is_not_mistaken_for_a_fault() -> None:
    async def main() -> None:
        engine, _ = await made(dataclasses.replace(PLAIN, hang_after=1), idle_s=5, first_token_s=5)
        task = asyncio.create_task(said(engine))
        await asyncio.sleep(1)
        await cancelled(task)
        assert task.cancelled()
        with pytest.raises(TimeoutError):  # a time-out of the caller's is still its own
            await asyncio.wait_for(said(engine), 1)
        with pytest.raises(EngineHung):
            await asyncio.wait_for(said(engine), 60)
        assert empty(engine)

    run(main())


@pytest.mark.parametrize(
    ("order", "kind"), [({"die_after": 4}, EngineDied), ({"lost_at_step": 4}, DeviceLost)]
)
def test_the_engines_death_fails_all_who_wait_and_all_who_come(
    order: dict[str, int], kind: type[EngineFault]
) -> None:
    async def main() -> None:
        engine, _ = await made(dataclasses.replace(PLAIN, slots=2, **order))  # type: ignore[arg-type]
        ends = await asyncio.gather(*(said(engine) for _ in range(6)), return_exceptions=True)
        assert [type(end) for end in ends] == [kind] * 6
        assert now() == pytest.approx(0.050)
        with pytest.raises(EngineDied):
            await said(engine)
        assert empty(engine)
        assert engine.stats().dead

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


def test_a_cliff_halves_the_places_lowers_the_capacity_and_passes() -> None:
    async def main() -> None:
        options = SimOptions(step_ms=50, seq_ms=0, slots=16, slow_from_s=30, slow_to_s=60, slow_factor=4)
        engine, inner = await made(options, min_batch=4)
        seen: list[tuple[float, int, int]] = []

        async def client() -> None:
            while now() < 150:
                await said(engine)

        async def watch() -> None:
            while now() < 150:
                await asyncio.sleep(0.5)
                seen.append((engine.stats().capacity, inner.stats().running, engine.counts().places))

        await asyncio.gather(watch(), *(client() for _ in range(32)))
        assert {capacity for capacity, _, _ in seen[:58]} == {1.0}
        assert (0.5, 8, 8) in seen[60:120]
        assert seen[-1] == (1.0, 16, 16)
        counts = engine.counts()
        assert counts.cliffs == 1
        assert counts.level == 0
        assert empty(engine)

    run(main())


class _Around:
    """The sim engine with something else about it."""

    def __init__(self) -> None:
        self._inner = SimEngine(PLAIN, clock=LoopClock())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _Endless(_Around):
    """It ends without saying why."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Token, None]:
        yield Token(1, "a")


class _Sleepless(_Around):
    async def sleep(self, level: int = 1) -> None:
        raise EngineFault("no sleep")


class _Clinging(_Around):
    """It takes a second to let go of a sequence."""

    held = 0

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Token, None]:
        self.held += 1
        try:
            async with contextlib.aclosing(self._inner.generate(request)) as tokens:
                async for token in tokens:
                    yield token
        finally:
            await asyncio.sleep(1)
            self.held -= 1


async def around(inner: _Around) -> Scheduled:
    engine = Scheduled(inner, clock=LoopClock())  # type: ignore[arg-type]
    await engine.start()
    return engine


def test_an_engine_that_just_ends_is_a_fault() -> None:
    async def main() -> None:
        with pytest.raises(EngineFault, match="without saying why"):
            await said(await around(_Endless()))

    run(main())


def test_an_engine_that_could_not_sleep_goes_on() -> None:
    async def main() -> None:
        engine = await around(_Sleepless())
        with pytest.raises(EngineFault, match="no sleep"):
            await engine.sleep()
        assert len(await said(engine)) == 8

    run(main())


def test_a_place_is_free_when_the_engine_let_go_and_not_before() -> None:
    async def main() -> None:
        inner = _Clinging()
        engine = await around(inner)
        for ask in (ASK, dataclasses.replace(ASK, deadline_s=0.5)):
            tokens = engine.generate(ask)
            await anext(tokens)
            await asyncio.sleep(0.6)  # the deadline, where there is one, passes behind the reader's back
            assert (engine.counts().running, inner.held) == (1, 1)
            closing = asyncio.create_task(tokens.aclose())  # type: ignore[arg-type]
            await asyncio.sleep(0.3)
            assert (engine.counts().running, inner.held) == (1, 1)
            await closing
            assert (engine.counts().running, inner.held) == (0, 0)

    run(main())


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
