"""The scheduler and its readers: slow ones, those that leave, and what an engine does while they do."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from services.engines.sim import SimEngine
from services.faults import DeadlinePassed
from tests.fakes.loop_clock import LoopClock
from tests.unit.scheduled import ASK, PLAIN, empty, ended, made, now, said
from tests.virtual import run


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


def test_a_place_is_free_when_the_engine_is_done_and_not_when_the_reader_is() -> None:
    async def main() -> None:
        engine, _ = await made(dataclasses.replace(PLAIN, slots=1))
        slow = engine.generate(ASK)
        first = await anext(slow)
        assert await ended(engine) == pytest.approx(0.160)  # the engine's own time for the two of them
        assert empty(engine)
        direct = SimEngine(PLAIN, clock=LoopClock())
        await direct.start()
        assert [first, *[token async for token in slow]] == await said(direct)

    run(main())


def test_what_is_made_ahead_of_a_reader_is_bounded_and_then_its_place_is_taken() -> None:
    async def main() -> None:
        engine, inner = await made(PLAIN, batch_size=1, concurrency=1, read_ahead=3)
        assert engine.facts().sequences == 1, "utilisation is of places, and there is one"
        slow = engine.generate(ASK)
        await anext(slow)
        other = asyncio.create_task(ended(engine))
        await asyncio.sleep(600)  # far beyond any limit on silence: it is the reader who is silent
        assert (engine.counts().running, engine.counts().queued, engine.counts().hangs) == (1, 1, 0)
        assert (inner.stats().running, engine.stats().running, engine.stats().waiting) == (0, 1, 1)
        assert len([token async for token in slow]) == 7
        await other
        assert empty(engine)

    run(main())
