"""The scheduler in numbers, for people and metrics.

Law: pure; reads the core and the governor, changes neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import TypeVar

from services.batching.core import Core
from services.batching.model import OTHER, BatchingCounts, BatchingSettings, Ticket
from services.batching.sampler import Governor

T = TypeVar("T", bound=Ticket)
PREFIX = "batching_"
IN_EXTRA = ("queued", "backing_off", "retries", "deadline_misses", "hangs", "cliffs", "batch", "places")


def gather(
    core: Core[T], governor: Governor[T], how: BatchingSettings, refusals: Mapping[str, int]
) -> BatchingCounts:
    return BatchingCounts(
        submitted=core.submitted,
        placed=core.placed,
        finished=core.finished,
        retries=core.retries,
        deadline_misses=core.deadline_misses,
        hangs=core.hangs,
        cliffs=governor.state.cliffs,
        level=governor.state.level,
        capacity=governor.capacity,
        batch=core.batch,
        places=core.places,
        delay_ms=core.delay_s * 1000,
        running=core.running,
        queued=core.queued,
        backing_off=core.delayed,
        kv_blocks=core.kv_blocks,
        waits=sum(core.waits),
        wait_s=core.wait_s,
        wait_buckets=tuple(accumulate(core.waits[:-1])),
        queue_by_class=dict(zip((*how.classes, OTHER), core.by_rank, strict=True)),
        refusals=dict(refusals),
    )


def extra(counts: BatchingCounts) -> dict[str, float]:
    """What goes into EngineStats.extra."""
    return {f"{PREFIX}{name}": float(getattr(counts, name)) for name in IN_EXTRA}
