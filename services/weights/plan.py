"""Which bytes of which file are read in what order: weights → 64 blocks by layer and by channel.

Law: pure. Takes facts about tensors, gives ranges; opens nothing. Every byte of every tensor is in exactly
one piece (tests/unit/test_weights_plan.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

BLOCKS = 64
PIECE = 8 << 20
"""No piece is longer, so that a block of a large model needs no buffer of gigabytes."""
SECTOR = 4096
"""What O_DIRECT wants offsets, lengths and buffers to be a multiple of, on every disk we know."""

ITEM_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
"""safetensors' names of the dtypes that we read. Not the 8-bit floats: without their scales, which each
publisher stores in another way, they would be loaded wrong and nobody would notice."""

_LAYER = re.compile(r"(?:^|\.)(\d+)\.")
_FIRST, _LAST = -1, 1 << 30


@dataclass(frozen=True, slots=True)
class Fact:
    """One tensor in one shard. start, stop: byte range in the file."""

    shard: str
    tensor: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of whole channels (rows) of one tensor. start, stop: byte range in the shard's file; offset: of
    `start` in the tensor.
    """

    shard: str
    tensor: str
    start: int
    stop: int
    offset: int


@dataclass(frozen=True, slots=True)
class Span:
    """Pieces that lie one behind the other in one file: one read. block: 0..63."""

    block: int
    shard: str
    pieces: tuple[Piece, ...]

    @property
    def start(self) -> int:
        return self.pieces[0].start

    @property
    def stop(self) -> int:
        return self.pieces[-1].stop


def layer_of(tensor: str) -> int:
    """Number of the layer a tensor belongs to: before all layers for embeddings, behind them for the rest."""
    found = _LAYER.search(tensor)
    return int(found[1]) if found else _FIRST if "embed" in tensor else _LAST


def plan(facts: Iterable[Fact], blocks: int = BLOCKS, piece: int = PIECE) -> tuple[tuple[Piece, ...], ...]:
    """`blocks` lists of pieces, in the order of the layers, of about equal size: a block ends with the
    channel in which its share of all bytes is reached. Of few bytes some blocks may be empty. Empty tensors
    are in none.
    """
    ordered = sorted(facts, key=lambda f: (layer_of(f.tensor), f.shard, f.start))
    total = sum(fact.nbytes for fact in ordered)
    found: list[list[Piece]] = [[] for _ in range(blocks)]
    done = 0
    for fact in ordered:
        unit, at = _unit(fact, piece), fact.start
        while at < fact.stop:
            block = done * blocks // total
            # Smallest byte count at which the next block begins.
            room = -(-total * (block + 1) // blocks) - done
            size = min(_up(room, unit), max(unit, piece // unit * unit), fact.stop - at)
            found[block].append(Piece(fact.shard, fact.tensor, at, at + size, at - fact.start))
            at, done = at + size, done + size
    return tuple(tuple(pieces) for pieces in found)


def _unit(fact: Fact, piece: int) -> int:
    """What is never cut: a channel, or one number where a channel is longer than a piece may be."""
    rows = fact.shape[0] if fact.shape else 1
    row = fact.nbytes // max(1, rows)
    return row if row <= piece else ITEM_BYTES[fact.dtype]


def spans(blocks: Sequence[Sequence[Piece]], longest: int = PIECE) -> tuple[Span, ...]:
    """The reads that bring these blocks, block by block; neighbours become one read."""
    return tuple(span for number, block in enumerate(blocks) for span in _spans(number, block, longest))


def _spans(number: int, block: Sequence[Piece], longest: int) -> list[Span]:
    found: list[Span] = []
    for shard, of_shard in groupby(sorted(block, key=lambda p: (p.shard, p.start)), key=lambda p: p.shard):
        run: list[Piece] = []
        for piece in of_shard:
            if run and (piece.start != run[-1].stop or piece.stop - run[0].start > longest):
                found.append(Span(number, shard, tuple(run)))
                run = []
            run.append(piece)
        found.append(Span(number, shard, tuple(run)))
    return found


def aligned(start: int, stop: int, step: int = SECTOR) -> tuple[int, int]:
    """The smallest range of whole sectors that holds this one."""
    return start // step * step, _up(stop, step)


def expected_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Size of a tensor. Raises KeyError for a dtype that we don't read."""
    return math.prod(shape) * ITEM_BYTES[dtype]


def _up(value: int, step: int) -> int:
    return -(-value // step) * step
