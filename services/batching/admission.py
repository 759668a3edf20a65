"""What one engine lets in: places, lanes, KV blocks; and when to come again.

Law: pure. Refusals that no waiting can cure are made here, before anything is queued.
"""

from __future__ import annotations

import math

from services.batching.model import BatchingSettings, Limits
from services.engine import EngineFacts
from services.faults import Refused
from services.kv.shape import blocks_for

UNLIMITED = 1 << 62
RATE_WINDOW_S = 5.0
OPEN_ENDED_TOKENS = 512
"""Booked for an answer whose length nobody named. Few grow longer; those that do grow inside the engine,
which preempts. To book all that the context leaves would let two or three chats fill a cache."""
RETRY_LEAST_S, RETRY_MOST_S, RETRY_UNKNOWN_S = 0.1, 60.0, 1.0


def limits(facts: EngineFacts, how: BatchingSettings) -> Limits:
    """The settings as far as the engine goes along. A static engine has whole batches only."""
    most = facts.sequences or UNLIMITED
    batch = min(how.batch_size, most)
    lanes = max(1, min(how.concurrency, most // batch))
    places = min(how.concurrency * batch, most) if facts.continuous else lanes * batch
    blocks = facts.kv_tokens // facts.kv_block if facts.kv_tokens else UNLIMITED
    return Limits(
        places,
        lanes,
        batch,
        blocks,
        facts.kv_block,
        facts.context,
        facts.continuous,
        facts.kv_window,
        facts.kv_chunk,
    )


def fitting(size: int, max_tokens: int, it: Limits) -> int:
    """A guessed size, cut to what is not refused: whether such a prompt fits, the server alone can say."""
    most = min(it.context or UNLIMITED, it.blocks * it.block)
    return max(0, min(size, most - max_tokens))


def need(size: int, max_tokens: int, it: Limits, *, open_ended: bool = False) -> int:
    """Most KV blocks that a sequence ever holds. Raises Refused (400) for one that can never be served.

    open_ended: the client named no length, max_tokens is a bound and no expectation.
    """
    whole = size + max_tokens
    if it.context and whole > it.context:
        message = (
            f"{size} tokens of prompt and max_tokens {max_tokens} are {whole}; the context holds {it.context}"
        )
        param = "prompt" if size >= it.context else "max_tokens"
        raise Refused(400, "context_length_exceeded", message, param=param)
    blocks = blocks_for(whole, it.block, it.window, it.chunk)
    if blocks > it.blocks:
        message = f"{whole} tokens are {blocks} blocks of KV; the whole cache has {it.blocks}"
        raise Refused(400, "kv_never_fits", message, param="max_tokens")
    if open_ended:
        return blocks_for(size + min(max_tokens, OPEN_ENDED_TOKENS), it.block, it.window, it.chunk)
    return blocks


class Rate:
    """Events a second over about the last window: the running one and its share of the one before."""

    __slots__ = ("_before", "_count", "_since")

    def __init__(self) -> None:
        self._since, self._count = -math.inf, 0
        self._before: int | None = None

    def count(self, now: float) -> None:
        if now - self._since >= RATE_WINDOW_S:
            self._turn(now)
        self._count += 1

    def per_s(self, now: float) -> float:
        """0 where nothing happened for two windows."""
        if now - self._since >= RATE_WINDOW_S:
            self._turn(now)
        spent = now - self._since
        if self._before is None:  # the first window isn't full yet
            return self._count / max(1.0, spent)
        return (self._count + self._before * (1 - spent / RATE_WINDOW_S)) / RATE_WINDOW_S

    def _turn(self, now: float) -> None:
        near = now - self._since < 2 * RATE_WINDOW_S
        self._before = self._count if near else None
        self._since = self._since + RATE_WINDOW_S if near else now
        self._count = 0


def retry_after_s(waiting: int, drained_per_s: float) -> float:
    """When a place in the queue's end will have been reached at the rate seen."""
    if drained_per_s <= 0:
        return RETRY_UNKNOWN_S
    return min(RETRY_MOST_S, max(RETRY_LEAST_S, (waiting + 1) / drained_per_s))


def backoff_s(how: BatchingSettings, tries: int, dice: float) -> float:
    """Before the next try after `tries` failed ones. dice: 0..1, takes off up to the share `jitter`."""
    whole = how.backoff_base_s * how.backoff_factor ** (tries - 1)
    return min(how.backoff_max_s, whole) * (1 - how.jitter * dice)
