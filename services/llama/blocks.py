"""The block allocator: which blocks of the KV pool belong to whom.

Law: pure numbers, no tensors. A block is free or taken, never both; giving back twice is an error, so that
two sequences can't ever write to the same place.
"""

from __future__ import annotations

from collections.abc import Sequence


class NoBlocks(Exception):
    """There are fewer free blocks than asked for; nothing was taken."""


class Blocks:
    """`count` blocks of `size` tokens. Freed blocks are used again first: their pages are warm."""

    def __init__(self, count: int, size: int) -> None:
        if count < 1 or size < 1:
            raise ValueError(f"{count} blocks of {size} tokens")
        self.count, self.size = count, size
        self._free = list(range(count - 1, -1, -1))
        self._taken = bytearray(count)

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.count - len(self._free)

    def take(self, number: int) -> list[int]:
        """`number` block ids. Raises NoBlocks and takes none when there aren't as many."""
        if number > len(self._free):
            raise NoBlocks(f"{number} blocks wanted, {len(self._free)} free")
        taken = [self._free.pop() for _ in range(number)]
        for block in taken:
            self._taken[block] = 1
        return taken

    def give(self, blocks: Sequence[int]) -> None:
        """Free them. Raises ValueError for one that is free already, and frees none then."""
        if len(set(blocks)) != len(blocks) or not all(self._taken[b] for b in blocks):
            raise ValueError(f"blocks {list(blocks)} are not all taken")
        for block in blocks:
            self._taken[block] = 0
        self._free.extend(reversed(blocks))


def blocks_dropped(computed: int, size: int, window: int) -> int:
    """Leading blocks that no later query sees, once `computed` tokens are in the cache. window 0: none."""
    return max(0, computed - window + 1) // size if window else 0
