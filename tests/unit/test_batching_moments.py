"""Clients that leave at any moment of a request's life, from an engine that is slow and clumsy at everything:
whatever happens, place and KV come back, and never before the engine has let go.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.batching import BatchingSettings, Scheduled
from services.engine import EngineFacts, EngineStats, FinishReason, GenerateRequest, Token
from services.fallback.engine import FallbackEngine
from services.faults import BadLogits, DeadlinePassed, EngineDied, EngineFault, EngineHung, Refused
from tests.fakes.loop_clock import LoopClock
from tests.unit.scheduled import empty
from tests.virtual import run

HOW = BatchingSettings(
    batch_size=3,
    concurrency=1,
    queue_limit=6,
    backoff_base_s=0.3,
    first_token_s=2.0,
    idle_s=1.0,
    read_ahead=3,
)
FACTS = EngineFacts("clumsy", "m", sequences=3, kv_tokens=160, kv_block=16, context=400)


@dataclass(slots=True)
class Clumsy:
    """An Engine. Each sequence takes its time to begin, between tokens, and to let go; some raise on the way,
    some while they let go, some hang. held: sequences it holds, and their tokens. wrong: done to it."""

    dice: Random
    held: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def sleep(self, level: int = 1) -> None: ...

    async def wake(self) -> None: ...

    def facts(self) -> EngineFacts:
        return FACTS

    def size(self, request: GenerateRequest) -> int:
        return len(request.prompt)

    def stats(self) -> EngineStats:
        return EngineStats(running=len(self.held))

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Token, None]:
        if request.request_id in self.held:
            self.wrong.append("two tries at a time")
        self.held[request.request_id] = len(request.prompt) + request.max_tokens
        if sum(-(-tokens // FACTS.kv_block) for tokens in self.held.values()) > 10 or len(self.held) > 3:
            self.wrong.append("more than it has room for")
        ill = False
        try:
            await self._pause(0.5)
            for index in range(request.max_tokens):
                last = index + 1 == request.max_tokens
                yield Token(index, "x", FinishReason.LENGTH if last else None, 1, "clumsy")
                await self._pause(0.1)
        except BadLogits:
            ill = True
            raise
        finally:
            await self._let_go(request, ill)

    async def _let_go(self, request: GenerateRequest, ill: bool) -> None:
        try:
            await asyncio.sleep(self.dice.choice((0.0, 0.2)))
        except asyncio.CancelledError:
            # Nobody outside can know of one that is ending by itself; any other has been told to already.
            if not ill:
                self.wrong.append("hurried while it lets go")
            raise
        finally:
            del self.held[request.request_id]
        if self.dice.random() < 0.1:
            raise RuntimeError("and it can't even let go")

    async def _pause(self, most: float) -> None:
        fate = self.dice.random()
        if fate < 0.04:
            raise BadLogits("NaN")
        await asyncio.sleep(99.0 if fate < 0.06 else self.dice.uniform(0, most))


async def client(engine: Any, number: int, dice: Random) -> str:
    """What came of it. It comes and leaves when it likes, and may be in a hurry while it leaves."""
    ask = GenerateRequest(f"r{number}", "p" * dice.randrange(1, 60), dice.randrange(1, 12))
    if dice.random() < 0.4:
        ask = dataclasses.replace(ask, deadline_s=dice.uniform(0.0, 2.0))
    await asyncio.sleep(dice.uniform(0, 2))
    reading = asyncio.create_task(_read(engine, ask, dice))
    if dice.random() < 0.6:
        await asyncio.wait((reading,), timeout=dice.uniform(0, 1.5))
        for _ in range(dice.choice((1, 2))):
            reading.cancel()
            await asyncio.sleep(dice.choice((0.0, 0.05)))
    await asyncio.wait((reading,))
    return "left" if reading.cancelled() else reading.result()


async def _read(engine: Any, ask: GenerateRequest, dice: Random) -> str:
    said = []
    try:
        async with contextlib.aclosing(engine.generate(ask)) as tokens:
            async for token in tokens:
                said.append(token.token_id)
                await asyncio.sleep(dice.choice((0.0, 0.0, 0.3)))
    except RuntimeError as error:
        return error.code if isinstance(error, EngineFault) else "bug"
    assert said == list(range(ask.max_tokens))
    return "whole"


CODES = {kind.code for kind in (BadLogits, DeadlinePassed, EngineHung)}
ENDS = CODES | {"left", "whole", "queue_full", "bug"}
RARE = {EngineDied.code}
"""Three that hang with no token for anybody between them are an engine that is stuck."""


async def settled(*engines: Scheduled) -> None:
    """Those that left in a hurry don't wait for the engine; it lets go by itself, within a second."""
    await asyncio.sleep(1)
    for engine in engines:
        assert empty(engine)
        assert isinstance(engine.engine, Clumsy)
        assert not engine.engine.held
        assert engine.engine.wrong == []
    assert len(asyncio.all_tasks()) == 1, "no task is left"


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 10**9))
def test_whoever_leaves_when_and_however_nothing_is_left(seed: int) -> None:
    async def main() -> None:
        dice = Random(seed)
        engine = Scheduled(Clumsy(dice), HOW, LoopClock(), dice)
        await engine.start()
        ends = await asyncio.gather(*(client(engine, n, dice) for n in range(25)))
        assert set(ends) <= ENDS | RARE
        await settled(engine)
        assert engine.counts().submitted == engine.counts().finished

    run(main())


@settings(deadline=None, max_examples=8)
@given(seed=st.integers(0, 10**9))
def test_nor_where_they_leave_between_two_engines(seed: int) -> None:
    async def main() -> None:
        dice, clock = Random(seed), LoopClock()
        pair = [Scheduled(Clumsy(dice), HOW, clock, dice) for _ in range(2)]
        both = FallbackEngine(*pair, clock=clock)
        await both.start()
        ends = await asyncio.gather(*(client(both, n, dice) for n in range(40)))
        assert set(ends) <= ENDS | RARE
        await settled(*pair)
        figures = both.stats().extra
        assert not any(value for name, value in figures.items() if name.startswith("weir_fallback_active"))
        assert not both._tally.active

    run(main())


def test_the_stories_tell_of_all_kinds_of_ends() -> None:
    async def main(seed: int) -> set[str]:
        dice = Random(seed)
        engine = Scheduled(Clumsy(dice), HOW, LoopClock(), dice)
        await engine.start()
        return set(await asyncio.gather(*(client(engine, n, dice) for n in range(25))))

    assert set().union(*(run(main(seed)) for seed in range(12))) == ENDS


@pytest.mark.parametrize("deadline_s", [0.3, 0.9])
def test_a_deadline_that_passes_while_it_waits_for_kv_leaves_the_cache_to_the_others(
    deadline_s: float,
) -> None:
    class Steady(Clumsy):
        async def _pause(self, most: float) -> None:
            await asyncio.sleep(0.1)

    async def main() -> None:
        engine = Scheduled(Steady(Random(1)), HOW, LoopClock())
        await engine.start()
        big = GenerateRequest("big", "p" * 140, 9)
        running = asyncio.create_task(_read(engine, big, Random(1)))
        await asyncio.sleep(0)
        late = dataclasses.replace(big, request_id="late", deadline_s=deadline_s)
        after = dataclasses.replace(big, request_id="after")
        waiting = [asyncio.create_task(_read(engine, ask, Random(1))) for ask in (late, after)]
        await asyncio.sleep(0.01)
        assert (engine.counts().running, engine.counts().queued) == (1, 2)
        assert await waiting[0] == DeadlinePassed.code
        assert (await running, await waiting[1]) == ("whole", "whole")
        await settled(engine)
        with pytest.raises(Refused):
            await _raised(engine, dataclasses.replace(big, max_tokens=30))

    run(main())


async def _raised(engine: Scheduled, ask: GenerateRequest) -> None:
    async with contextlib.aclosing(engine.generate(ask)) as tokens:
        async for _ in tokens:
            pass
