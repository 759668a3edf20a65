"""A scheduler over the sim engine in virtual time, and what a test asks of it.

Law: times are the loop's own, in seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from random import Random
from typing import Any

from services.batching import BatchingSettings, Scheduled
from services.engine import Engine, GenerateRequest, Token
from services.engines.sim import SimEngine
from services.sim_cost import SimOptions
from tests.fakes.loop_clock import LoopClock

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
