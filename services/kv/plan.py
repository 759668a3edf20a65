"""What fits: how many sequences of a context go into a memory, and where that stops.

Law: pure arithmetic over KvShape. The answer is what the engine's paged pool can hold (whole blocks, one
table for all layers); room for activations and the allocator's own slack is the caller's `reserve`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from services.kv.shape import KvShape

HORIZON = 1 << 40
"""Contexts beyond this many tokens are "never": no machine of this century gets there."""


class NoRoom(ValueError):
    """The memory is gone before the first block: weights and reserve take it all."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one device. total: all of it; weights: taken by the model; reserve: kept for activations."""

    total: int
    weights: int = 0
    reserve: int = 0

    @property
    def for_kv(self) -> int:
        return self.total - self.weights - self.reserve


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer for one context. All sizes in bytes, all lengths in tokens.

    sequences: of `context` tokens each at the same time. longest: longest single sequence (0: none fits;
    None: no limit, a window bounds it). one_less_from: shortest context at which one sequence less fits.
    none_from: shortest context at which none does. None there: at no context.
    """

    shape: KvShape
    memory: Memory
    context: int
    blocks: int
    sequences: int
    longest: int | None
    one_less_from: int | None
    none_from: int | None

    @property
    def sequence_bytes(self) -> int:
        return self.shape.sequence_bytes(self.context)

    @property
    def pool_bytes(self) -> int:
        return self.shape.pool_bytes(self.blocks)

    @property
    def ratio(self) -> float:
        """Kept over all: 1.0 for keep-all, W / L with a window."""
        return self.shape.memory_ratio(self.context)

    @property
    def missing_bytes(self) -> int:
        """What one sequence lacks; 0 when one fits."""
        return max(0, self.sequence_bytes - self.pool_bytes)


def plan(shape: KvShape, memory: Memory, context: int) -> Plan:
    """Plan for sequences of `context` tokens. Raises NoRoom, ValueError for a context below 1."""
    if context < 1:
        raise ValueError(f"context {context}: must be at least 1 token")
    if memory.for_kv <= 0:
        raise NoRoom(f"{memory.total} bytes, {memory.weights + memory.reserve} of them taken")
    blocks = shape.pool_blocks(memory.for_kv)
    sequences = blocks // shape.blocks(context)
    longest = _last(lambda tokens: shape.blocks(tokens) <= blocks)
    one_less = _last(lambda tokens: blocks // shape.blocks(tokens) >= sequences) if sequences else None
    return Plan(
        shape=shape,
        memory=memory,
        context=context,
        blocks=blocks,
        sequences=sequences,
        longest=longest,
        one_less_from=None if one_less is None else one_less + 1,
        none_from=None if longest is None else longest + 1,
    )


def _last(holds: Callable[[int], bool]) -> int | None:
    """The greatest length for which `holds` (true up to a point, false from there); 0: not even for 1; None:
    for all."""
    if holds(HORIZON):
        return None
    low, high = 0, HORIZON
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
