"""The scheduler over an engine that fails, hangs, dies or gets slow: who is tried again, who is told."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from services.batching import Scheduled
from services.batching.scheduled import STUCK
from services.engine import GenerateRequest, Token
from services.engines.sim import SimEngine
from services.faults import DeadlinePassed, DeviceLost, EngineDied, EngineFault, EngineHung, Refused
from services.sim_cost import SimOptions
from tests.fakes.loop_clock import LoopClock
from tests.unit.scheduled import (
    ASK,
    PLAIN,
    cancelled,
    empty,
    made,
    now,
    said,
)
from tests.virtual import run


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


def test_who_backs_off_counts_as_waiting_and_where_nobody_may_wait_there_is_no_other_try() -> None:
    async def main() -> None:
        engine, _ = await made(
            dataclasses.replace(PLAIN, fail_first=9), queue_limit=2, backoff_base_s=2, jitter=0
        )
        work = [asyncio.create_task(said(engine)) for _ in range(2)]
        await asyncio.sleep(0.5)
        third = asyncio.create_task(said(engine))
        await asyncio.sleep(0)
        assert (engine.counts().backing_off, engine.counts().queued) == (2, 0)
        with pytest.raises(Refused) as refused:
            await third
        assert refused.value.code == "queue_full"
        await cancelled(*work)
        assert empty(engine)

    run(main())


def test_a_fault_is_told_where_nobody_more_may_wait_for_another_try() -> None:
    async def main() -> None:
        engine, _ = await made(dataclasses.replace(PLAIN, oom_at_step=0), queue_limit=2)
        ends = await asyncio.gather(*(said(engine) for _ in range(3)), return_exceptions=True)
        assert sorted(type(end).__name__ for end in ends) == ["OutOfDeviceMemory", "list", "list"]
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
