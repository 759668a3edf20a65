"""Crowds at the scheduler: clients of every kind, faults on order, and nothing left over at the end.

Each is a story in virtual time that follows from its seed alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.batching import BatchingCounts, BatchingSettings, Scheduled
from services.engine import EngineStats, FinishReason, GenerateRequest
from services.engines.sim import SimEngine
from services.faults import BadLogits, DeadlinePassed, EngineDied, EngineFault, EngineHung
from services.sim_cost import SimOptions, Words
from tests.fakes.loop_clock import LoopClock
from tests.virtual import run

CROWD = 40
HOW = BatchingSettings(
    batch_size=6, concurrency=3, queue_limit=18, first_token_s=3, idle_s=1, backoff_base_s=0.02, sample_s=0.2
)


@dataclass(slots=True)
class Client:
    """What one client does and what came of it. patience: tokens until it goes; slow: seconds a token."""

    ask: GenerateRequest
    comes: float
    patience: int
    leaves: float
    slow: float
    said: list[int] = field(default_factory=list)
    end: str = ""

    async def go(self, engine: Scheduled) -> None:
        await asyncio.sleep(self.comes)
        try:
            async with asyncio.timeout(self.leaves):
                await self._read(engine)
        except TimeoutError:
            self.end = "cancelled"
        except EngineFault as fault:
            self.end = fault.code

    async def _read(self, engine: Scheduled) -> None:
        async with contextlib.aclosing(engine.generate(self.ask)) as tokens:
            async for token in tokens:
                self.said.append(token.token_id)
                if token.finish is not None:
                    self.end = token.finish.value
                elif len(self.said) >= self.patience:
                    self.end = "left"
                    return
                if self.slow:
                    await asyncio.sleep(self.slow)


def client(dice: Random, number: int) -> Client:
    prompt = "w" * dice.randrange(1, 200)
    ask = GenerateRequest(f"r{number}", prompt, dice.randrange(1, 40), seed=number)
    ask = dataclasses.replace(ask, tenant_class=dice.choice(("gold", "silver", "")))
    if dice.random() < 0.3:
        ask = dataclasses.replace(ask, deadline_s=dice.uniform(0.01, 1))
    return Client(
        ask,
        comes=dice.choice((0.0, dice.uniform(0, 1))),
        patience=dice.randrange(1, 40) if dice.random() < 0.2 else 10**9,
        leaves=dice.uniform(0, 1) if dice.random() < 0.2 else 10**6,
        slow=dice.uniform(0, 0.2) if dice.random() < 0.1 else 0.0,
    )


def options(dice: Random) -> SimOptions:
    faults = {"nan_after": 30, "hang_after": 33, "oom_at_step": 7, "die_after": 34}
    order = {name: at for name, at in faults.items() if dice.random() < 0.25}
    return dataclasses.replace(
        SimOptions(step_ms=8, seq_ms=0.5),
        slots=dice.choice((1, 5, 12)),
        kv_tokens=dice.choice((64, 640, 4000)),
        continuous=dice.choice((0, 1)),
        fail_rate=dice.choice((0.0, 0.2)),
        **order,  # type: ignore[arg-type]
    )


ENDS = {"stop", "length", "left", "cancelled"} | {
    kind.code for kind in (EngineFault, BadLogits, DeadlinePassed, EngineHung, EngineDied)
}
ENDS |= {"queue_full", "kv_never_fits", "out_of_memory"}


async def story(seed: int) -> tuple[BatchingCounts, EngineStats, list[Client]]:
    """What is left of a crowd when all have gone, and what became of each."""
    dice, clock = Random(seed), LoopClock()
    engine = Scheduled(SimEngine(options(dice), clock=clock), HOW, clock, dice)
    await engine.start()
    crowd = [client(dice, number) for number in range(CROWD)]
    await asyncio.gather(*(one.go(engine) for one in crowd))
    left = engine.counts(), engine.stats()
    await engine.close()
    return *left, crowd


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10**9))
def test_every_request_ends_once_says_its_own_words_once_and_leaves_nothing(seed: int) -> None:
    counts, stats, crowd = run(story(seed))
    for one in crowd:
        assert one.end in ENDS
        words = Words(one.ask)
        assert one.said == [words.at(index)[0] for index in range(len(one.said))]  # none twice after a retry
        if one.end == FinishReason.LENGTH.value:
            assert len(one.said) == one.ask.max_tokens
    assert (counts.running, counts.queued, counts.backing_off, counts.kv_blocks) == (0, 0, 0, 0)
    assert (stats.running, stats.waiting, stats.kv_used) == (0, 0, 0.0)
    assert counts.submitted == counts.finished
    assert counts.submitted + sum(counts.refusals.values()) <= CROWD


@pytest.mark.parametrize("seed", [1, 2])
def test_a_story_follows_from_its_seed(seed: int) -> None:
    told = [[(one.end, tuple(one.said)) for one in run(story(seed))[-1]] for _ in range(2)]
    assert told[0] == told[1]


def test_the_stories_tell_of_all_kinds_of_ends() -> None:
    ends: set[str] = set()
    for seed in range(20):
        ends |= {one.end for one in run(story(seed))[-1]}
    assert ends == ENDS - {"stop"}
