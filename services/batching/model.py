"""What the scheduler is told and what it keeps of a request: settings, limits, tickets, counts.

Law: pure data. A ticket belongs to the core; others read it and call the core to change it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from services.batching.cliff import CliffSettings

OTHER = "other"
"""What all classes that the settings don't name are called in counts."""
WAIT_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


@dataclass(frozen=True, slots=True)
class BatchingSettings:
    """A batch leaves when batch_size requests wait or the oldest waited max_delay_ms; `concurrency` batches
    at once. queue_limit: requests that may wait, for a place or for their next try. classes: best first; a
    class is worth ageing_s of waiting over the next, so that none starves. retries: of a request that failed
    before its first token, after backoff_base_s * backoff_factor ** n (at most backoff_max_s), up to `jitter`
    of it less. first_token_s, idle_s: a sequence that says nothing for longer is hung. read_ahead: tokens of
    a sequence that may wait for a slow reader; beyond them it keeps its place until they are read. min_batch:
    the cliff detector goes no lower. sample_s, sample_steps: least time and tokens per sequence that make one
    throughput sample.
    Raises ValueError for values that make no sense.
    """

    batch_size: int = 128
    max_delay_ms: float = 50.0
    concurrency: int = 4
    queue_limit: int = 1024
    classes: tuple[str, ...] = ("gold", "silver")
    ageing_s: float = 5.0
    retries: int = 2
    backoff_base_s: float = 0.05
    backoff_factor: float = 1.5
    backoff_max_s: float = 2.0
    jitter: float = 0.2
    first_token_s: float = 120.0
    idle_s: float = 60.0
    read_ahead: int = 8192
    min_batch: int = 8
    sample_s: float = 1.0
    sample_steps: int = 16
    cliff: CliffSettings = field(default_factory=CliffSettings)

    def __post_init__(self) -> None:
        least = {
            "batch_size": 1,
            "concurrency": 1,
            "queue_limit": 1,
            "min_batch": 1,
            "backoff_factor": 1,
            "read_ahead": 1,
        }
        least |= {"max_delay_ms": 0, "retries": 0, "backoff_base_s": 0, "jitter": 0, "ageing_s": 0}
        for name, low in least.items():
            if not getattr(self, name) >= low:
                raise ValueError(f"{name} = {getattr(self, name)}: at least {low}")
        for name in ("first_token_s", "idle_s", "sample_s", "sample_steps"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} = {getattr(self, name)}: more than 0")
        if self.jitter > 1:
            raise ValueError(f"jitter = {self.jitter}: at most 1")


@dataclass(frozen=True, slots=True)
class Limits:
    """What the settings come to on one engine. places: sequences at once, all lanes together; lanes, batch:
    batches at once and places in each; blocks: KV blocks of `block` tokens; context: tokens, 0: any. window,
    chunk: as in services.engine.EngineFacts.
    """

    places: int
    lanes: int
    batch: int
    blocks: int
    block: int
    context: int
    continuous: bool
    window: int = 0
    chunk: int = 1


class Phase(Enum):
    """Where a ticket is. GONE is final: served, cancelled, failed or late."""

    NEW = 0
    QUEUED = 1
    PLACED = 2
    DELAYED = 3
    GONE = 4


NEW, QUEUED, PLACED, DELAYED, GONE = Phase
"""The same by plain names: `Phase.QUEUED` is a search in a class, and the core asks ten times a request."""


@dataclass(slots=True, eq=False)
class Ticket:
    """One request in the scheduler; times are seconds of the caller's monotonic clock.

    need: KV blocks. rank: 0 is the best class. deadline: math.inf for none. stall_at: when its silence is a
    hang (the shell sets it while it waits for a token). queued_at: since when it waits, this time. key: place
    in the order; number: of its arrival.
    """

    need: int
    rank: int
    arrived: float
    deadline: float = math.inf
    stall_at: float = math.inf
    retry_at: float = math.inf
    queued_at: float = 0.0
    key: float = 0.0
    number: int = 0
    phase: Phase = NEW
    lane: int = 0
    armed: float = math.inf


class Late(Enum):
    """Why the core hands a ticket out of `due`."""

    DEADLINE = "deadline"
    SILENT = "silent"


@dataclass(frozen=True, slots=True)
class BatchingCounts:
    """The scheduler at this moment; counters since start. Keys of queue_by_class: the settings' classes and
    OTHER. wait_buckets: how many waited at most WAIT_BUCKETS_S[i] for their place (cumulative); waits and
    wait_s: how many and how long together. batch, delay_ms, places: in force now. level: halvings in force.
    capacity: share of its usual throughput that the engine is believed to have.
    """

    submitted: int = 0
    placed: int = 0
    finished: int = 0
    retries: int = 0
    deadline_misses: int = 0
    hangs: int = 0
    cliffs: int = 0
    level: int = 0
    capacity: float = 1.0
    batch: int = 0
    places: int = 0
    delay_ms: float = 0.0
    running: int = 0
    queued: int = 0
    backing_off: int = 0
    kv_blocks: int = 0
    waits: int = 0
    wait_s: float = 0.0
    wait_buckets: tuple[int, ...] = ()
    queue_by_class: Mapping[str, int] = field(default_factory=dict)
    refusals: Mapping[str, int] = field(default_factory=dict)
