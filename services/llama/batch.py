"""A plan as tensors: what every layer of one step needs to know, computed once.

Law: shapes and positions only; no weights. Rows: the decoding sequences, one token each, then the chunks one
after the other.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from services.llama.planner import Chunk, Plan
from services.llama.pool import KvPool
from services.llama.sequence import Sequence

NEVER = float("-inf")
LEAST_WIDTH = 8
"""Blocks up to which tables aren't told apart: a launch costs more than what padding wastes."""


@dataclass(slots=True)
class Decodes:
    """Rows `at` to `at + count`: B sequences, one token each.

    blocks: (B · N,) padded with own blocks; mask: (B, 1, 1, N · block); lengths: (B,) int32, keys that there
    are; buffer: where every layer gathers its blocks.
    """

    at: int
    count: int
    blocks: Tensor
    mask: Tensor
    lengths: Tensor
    buffer: Tensor


@dataclass(slots=True)
class Prefill:
    """One chunk: rows `at` to `at + count`, which see `keys` keys.

    blocks (N,), mask (count, N · block) and buffer are None where the chunk is the whole of what it sees:
    then K and V come from the step itself, and causality is enough.
    """

    at: int
    count: int
    keys: int
    blocks: Tensor | None = None
    mask: Tensor | None = None
    buffer: Tensor | None = None


@dataclass(slots=True)
class Batch:
    """ids, positions, slots: (T,). rows: those whose logits are wanted, None: all of them."""

    ids: Tensor
    positions: Tensor
    slots: Tensor
    rows: Tensor | None
    decodes: tuple[Decodes, ...]
    prefills: list[Prefill]


def build(plan: Plan, pool: KvPool, dtype: torch.dtype, window: int = 0) -> Batch:
    """Tensors of this plan on the pool's device. dtype: of the masks, which is that of the computation."""
    ids = [s.tokens[s.computed] for s in plan.decodes]
    positions = [s.computed for s in plan.decodes]
    slots = [slot(s, s.computed, pool.block) for s in plan.decodes]
    rows = list(range(len(ids)))
    prefills = []
    for chunk in plan.chunks:
        s, span = chunk.sequence, range(chunk.start, chunk.start + chunk.count)
        prefills.append(_prefill(chunk, len(ids), pool, dtype, window))
        ids += s.tokens[span.start : span.stop]
        positions += span
        slots += [slot(s, p, pool.block) for p in span]
        if chunk.last:
            rows.append(len(ids) - 1)
    whole = torch.tensor([ids, positions, slots], dtype=torch.int64).to(pool.device)
    wanted = None if len(rows) == len(ids) else torch.tensor(rows, dtype=torch.int64, device=pool.device)
    decodes = tuple(_decodes(group, plan.decodes, pool, dtype, window) for group in groups(plan.decodes))
    return Batch(whole[0], whole[1], whole[2], wanted, decodes, prefills)


def groups(sequences: Seq[Sequence]) -> list[range]:
    """Rows that share a table. Tables are padded to the widest of a group, so a long sequence must not
    share one with many short ones: within a group, at most twice as wide. Sequences come by width."""
    cuts = [0]
    for row, sequence in enumerate(sequences):
        narrowest = len(sequences[cuts[-1]].blocks)
        if len(sequence.blocks) > max(LEAST_WIDTH, 2 * narrowest):
            cuts.append(row)
    return [range(a, b) for a, b in pairwise([*cuts, len(sequences)]) if b > a]


def slot(sequence: Sequence, position: int, block: int) -> int:
    """Flat place in the pool of one token."""
    return sequence.blocks[position // block - sequence.dropped] * block + position % block


def padded(sequences: Seq[Sequence], width: int) -> list[list[int]]:
    """Block tables of equal width. Padding repeats a block of the sequence itself: it is masked, but NaN in
    it would pass the mask, and nobody may be spoilt by another."""
    return [s.blocks + s.blocks[:1] * (width - len(s.blocks)) for s in sequences]


def _decodes(rows: range, all_: Seq[Sequence], pool: KvPool, dtype: torch.dtype, window: int) -> Decodes:
    sequences = all_[rows.start : rows.stop]
    count, width = len(sequences), max(len(s.blocks) for s in sequences)
    table = torch.tensor(padded(sequences, width), dtype=torch.int64).to(pool.device)
    first = torch.tensor([[s.dropped * pool.block] for s in sequences]).to(pool.device)
    last = torch.tensor([[s.computed] for s in sequences]).to(pool.device)
    mask = decode_mask(first, last, width * pool.block, dtype, window)
    buffer = pool.buffer(count * width)
    return Decodes(rows.start, count, table.view(-1), mask, lengths(first, last), buffer)


def decode_mask(first: Tensor, last: Tensor, tokens: int, dtype: torch.dtype, window: int) -> Tensor:
    """(B, 1, 1, tokens), 0 where a query sees the key, else -inf. first, last: (B, 1), position of the first
    key of the table, and of the query."""
    at = torch.arange(tokens, device=first.device)[None] + first
    hidden = at > last
    if window:
        hidden |= at <= last - window
    mask = torch.zeros(hidden.shape, dtype=dtype, device=first.device).masked_fill_(hidden, NEVER)
    return mask[:, None, None]


def lengths(first: Tensor, last: Tensor) -> Tensor:
    """(B,): keys in the table of each row, its own included."""
    return (last - first + 1).view(-1).int()


def _prefill(chunk: Chunk, at: int, pool: KvPool, dtype: torch.dtype, window: int) -> Prefill:
    end = chunk.start + chunk.count
    if not chunk.start and (not window or end <= window):
        return Prefill(at, chunk.count, chunk.count)
    s, device = chunk.sequence, pool.device
    first = s.dropped * pool.block
    query = torch.arange(chunk.start, end, device=device)[:, None]
    key = torch.arange(first, first + len(s.blocks) * pool.block, device=device)[None]
    hidden = key > query
    if window:
        hidden |= key <= query - window
    mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, NEVER)
    blocks = torch.tensor(s.blocks, dtype=torch.int64, device=device)
    return Prefill(at, chunk.count, end - first, blocks, mask, pool.buffer(len(s.blocks)))
