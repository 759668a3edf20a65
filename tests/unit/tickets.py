"""Tickets for the scheduler's core, and a core to take them.

Law: pure; the time is the caller's.
"""

from __future__ import annotations

import math

from services.batching.admission import limits
from services.batching.core import Core
from services.batching.model import BatchingSettings, Ticket
from services.engine import EngineFacts

FREE = EngineFacts("x")


def facts(
    sequences: int = 0, *, continuous: bool = True, kv_tokens: int = 0, kv_block: int = 16
) -> EngineFacts:
    return EngineFacts(
        "x", sequences=sequences, kv_tokens=kv_tokens, kv_block=kv_block, continuous=continuous, context=4096
    )


def core(of: EngineFacts = FREE, **change: float) -> Core[Ticket]:
    how = BatchingSettings(**change)  # type: ignore[arg-type]
    return Core(how, limits(of, how))


def ticket(now: float = 0.0, *, blocks: int = 1, rank: int = 0, deadline: float = math.inf) -> Ticket:
    return Ticket(blocks, rank, now, deadline)


def come(it: Core[Ticket], now: float, count: int = 1) -> list[Ticket]:
    made = [ticket(now) for _ in range(count)]
    for one in made:
        it.submit(one, now)
    return made
