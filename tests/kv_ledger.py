"""Who holds how many KV blocks right now, and whether one more request may come in: written to be read.

Law: what the scheduler's and the planner's own bookkeeping is compared with in tests; pure bookkeeping on
whole blocks, it knows neither memory nor time. What it hands out never exceeds its capacity, and freeing what
was never held is an error: a double free is a bug that must show.

Three numbers per request: reserved (blocks promised to it, for its whole length or a part of it), committed
(tokens written so far), and the blocks that those tokens fill. committed blocks <= reserved blocks always;
the sum of the reserved is what `used` means, since nobody else can have them.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.kv.shape import DEFAULT_BLOCK, KvShape, blocks_for


class LedgerError(RuntimeError):
    """A booking that can't be right: over capacity, twice, or of a request that holds nothing."""


@dataclass(frozen=True, slots=True)
class Fits:
    """It may start now and takes this many blocks."""

    blocks: int


@dataclass(frozen=True, slots=True)
class Later:
    """It fits an empty cache, not the present one: `missing` blocks must come free first."""

    blocks: int
    missing: int


@dataclass(frozen=True, slots=True)
class Never:
    """It doesn't fit even an empty cache; refuse it before any work is done. reason: for people."""

    blocks: int
    reason: str


Admission = Fits | Later | Never


@dataclass(slots=True)
class _Holding:
    reserved: int
    committed: int


class KvLedger:
    """Bookings of one engine's cache of `capacity` blocks."""

    def __init__(self, capacity: int, block: int = DEFAULT_BLOCK, window: int = 0, chunk: int = 1) -> None:
        if capacity < 0:
            raise ValueError(f"capacity {capacity}: not a number of blocks")
        blocks_for(0, block, window, chunk)  # refuses what is no size
        self.capacity, self.block, self.window, self.chunk = capacity, block, window, chunk
        self._holdings: dict[str, _Holding] = {}
        self._used = 0

    @classmethod
    def of_shape(cls, shape: KvShape, memory: int) -> KvLedger:
        """A ledger for the blocks of `shape` that go into `memory` bytes."""
        return cls(shape.pool_blocks(memory), shape.block, shape.pool_window, shape.chunk)

    @property
    def used(self) -> int:
        """Blocks promised."""
        return self._used

    @property
    def free_blocks(self) -> int:
        return self.capacity - self._used

    @property
    def use(self) -> float:
        """Share of the blocks that are promised, 0..1."""
        return self._used / self.capacity if self.capacity else 0.0

    @property
    def requests(self) -> int:
        return len(self._holdings)

    @property
    def written(self) -> int:
        """Tokens written and not yet freed (with a window: all that were written, also those behind it)."""
        return sum(h.committed for h in self._holdings.values())

    def blocks(self, tokens: int) -> int:
        """Blocks that a sequence of `tokens` needs here."""
        return blocks_for(tokens, self.block, self.window, self.chunk)

    def reserved(self, request_id: str) -> int:
        """Blocks promised to this request; 0 when it holds none."""
        holding = self._holdings.get(request_id)
        return holding.reserved if holding else 0

    def reserve(self, request_id: str, tokens: int) -> int:
        """Promise room for `tokens` in all; a second time enlarges it (never shrinks). Blocks it holds now.

        Raises LedgerError when they aren't there; nothing is booked then.
        """
        holding = self._holdings.get(request_id)
        have = holding.reserved if holding else 0
        want = max(have, self.blocks(tokens))
        if want - have > self.free_blocks:
            raise LedgerError(f"{request_id}: {want - have} blocks wanted, {self.free_blocks} free")
        self._used += want - have
        if holding:
            holding.reserved = want
        else:
            self._holdings[request_id] = _Holding(want, 0)
        return want

    def commit(self, request_id: str, tokens: int = 1) -> None:
        """`tokens` more were written. Raises LedgerError beyond what is reserved: the engine would have
        written into somebody else's block."""
        holding = self._held(request_id)
        if tokens < 0 or self.blocks(holding.committed + tokens) > holding.reserved:
            raise LedgerError(
                f"{request_id}: {holding.committed} + {tokens} tokens don't go into {holding.reserved} blocks"
            )
        holding.committed += tokens

    def free(self, request_id: str) -> int:
        """Everything back; the number of blocks. Raises LedgerError when it holds nothing."""
        holding = self._held(request_id)
        del self._holdings[request_id]
        self._used -= holding.reserved
        return holding.reserved

    def _held(self, request_id: str) -> _Holding:
        holding = self._holdings.get(request_id)
        if holding is None:
            raise LedgerError(f"{request_id}: holds nothing")
        return holding


def admit(tokens: int, ledger: KvLedger, context: int = 0) -> Admission:
    """Whether a sequence of `tokens` (prompt and answer) may start now, later, or never.

    context: the model's own limit in tokens, 0: none known.
    """
    blocks = ledger.blocks(tokens)
    if context and tokens > context:
        return Never(blocks, f"{tokens} tokens are more than the model's context of {context}")
    if blocks > ledger.capacity:
        return Never(
            blocks,
            f"{tokens} tokens need {blocks} blocks of KV cache, the engine has {ledger.capacity} in all",
        )
    missing = blocks - ledger.free_blocks
    return Later(blocks, missing) if missing > 0 else Fits(blocks)
