"""Decoding with CUDA graphs: the whole step launched at once, from buffers that never move.

Law: which bucket a step goes to is pure (`Buckets`); `GraphCore` only replaces how a step of decoding rows
alone is computed, everything else is CachedCore's. Without a GPU the same buffers are run without a capture,
so that a test on a CPU goes the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from services.kv.shape import ceil_div
from services.llama.batch import Batch, Decodes, decode_mask, lengths, padded, slot
from services.llama.cached import CachedCore
from services.llama.decoder import Decoder
from services.llama.planner import Plan, Planner
from services.llama.pool import KvPool
from services.llama.sequence import Sequence

ROOM = 2
"""Blocks that a step may gather, in pools; of one layer at a time, so ROOM / layers of the pool's bytes."""

COLUMNS = 5
"""Numbers per row in front of its blocks: id, position, slot, position of the first key, and of the query."""


@dataclass(frozen=True, slots=True)
class Buckets:
    """Powers of two up to the most rows and the widest table; each pair is one graph."""

    rows: int
    blocks: int

    def of(self, rows: int, blocks: int) -> tuple[int, int]:
        """The smallest bucket that holds this step. Raises ValueError when none does."""
        if not (0 < rows <= self.rows and 0 < blocks <= self.blocks):
            raise ValueError(f"{rows} rows of {blocks} blocks, the largest is {self.rows} of {self.blocks}")
        return min(_power(rows), self.rows), min(_power(blocks), self.blocks)

    def count(self) -> int:
        """How many graphs there can be."""
        return len({_power(n) for n in range(1, self.rows + 1)}) * len(
            {_power(n) for n in range(1, self.blocks + 1)}
        )


def _power(number: int) -> int:
    return 1 << (number - 1).bit_length()


def table(sequences: tuple[Sequence, ...], rows: int, blocks: int, block: int) -> list[list[int]]:
    """What the buffers of a bucket are filled with, COLUMNS + blocks numbers a row.

    Rows beyond the sequences repeat the first one: they compute what it computes, and write the same values
    to the same place, so that no block has to be kept aside for them.
    """
    tables = padded(sequences, blocks)
    filled = [
        [
            s.tokens[s.computed],
            s.computed,
            slot(s, s.computed, block),
            s.dropped * block,
            s.computed,
            *blocks_of,
        ]
        for s, blocks_of in zip(sequences, tables, strict=True)
    ]
    return filled + [filled[0]] * (rows - len(sequences))


class _Step:
    """One bucket: its buffers, and the step that reads them."""

    def __init__(self, rows: int, blocks: int, decoder: Decoder, pool: KvPool, room: Tensor) -> None:
        """room: where layers gather blocks, shared by all steps: one runs at a time."""
        device = pool.device
        self.rows, self.blocks = rows, blocks
        self._input = torch.zeros((rows, COLUMNS + blocks), dtype=torch.int64, device=device)
        self._window, self._decoder, self._pool = decoder.config.window, decoder, pool
        self._gathered = room[: rows * blocks]
        self._logits: Tensor | None = None
        self._replay: Callable[[], None] | None = None

    def __call__(self, numbers: list[list[int]], memory: Any) -> Tensor:
        """Logits (rows, vocabulary), good until the next call. memory: the graphs' common pool."""
        self._input.copy_(torch.tensor(numbers, dtype=torch.int64))
        if self._logits is None and self._input.is_cuda:
            self._capture(memory)
        # Not kept as one attribute: a step that holds its own method is a cycle, and its memory stays on.
        launch = self._replay or self._compute
        launch()
        assert self._logits is not None
        return self._logits

    def _compute(self) -> None:
        numbers = self._input
        ids, positions, slots = numbers[:, 0], numbers[:, 1], numbers[:, 2]
        tokens = self.blocks * self._pool.block
        mask = decode_mask(numbers[:, 3:4], numbers[:, 4:5], tokens, self._decoder.dtype, self._window)
        blocks = numbers[:, COLUMNS:].reshape(-1)
        decodes = Decodes(0, self.rows, blocks, mask, lengths(numbers[:, 3], numbers[:, 4]), self._gathered)
        self._logits = self._decoder.logits(Batch(ids, positions, slots, None, (decodes,), []), self._pool)

    def _capture(self, memory: Any) -> None:
        # Once outside: libraries set themselves up at their first call, which can't be captured. Running a
        # step twice is harmless, it writes the same K and V.
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            self._compute()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=memory):
            self._compute()
        self._replay = graph.replay


class GraphCore(CachedCore):
    """See core.Core."""

    def __init__(self, decoder: Decoder, planner: Planner, pool: KvPool) -> None:
        super().__init__(decoder, planner, pool)
        longest = min(pool.blocks, ceil_div(decoder.config.context, pool.block))
        self.buckets = Buckets(planner.most, longest)
        self._steps: dict[tuple[int, int], _Step] = {}
        self._generation = -1
        self._memory: Any = None
        self._room = pool.buffer(0)
        self._renew()

    def forward(self, plan: Plan, batch: Batch | None = None) -> Tensor:
        """Logits of the rows that get a token. batch: not needed where all rows decode."""
        if plan.chunks or not plan.decodes:
            return super().forward(plan, batch)
        widest = max(len(s.blocks) for s in plan.decodes)
        key = self.buckets.of(len(plan.decodes), widest)
        if key[0] * key[1] > ROOM * self.pool.blocks:
            # One long sequence among many short ones: padding all to its width costs more than launches.
            return super().forward(plan, batch)
        self._renew()
        step = self._steps.get(key)
        if step is None:
            step = self._steps[key] = _Step(*key, self.decoder, self.pool, self._room)
        return step(table(plan.decodes, *key, self.pool.block), self._memory)[: len(plan.decodes)]

    def give_back(self) -> None:
        # Before the pool: who frees last empties torch's cache.
        self._forget()
        super().give_back()

    @property
    def missing(self) -> int:
        room = 0 if self._room.nbytes else ROOM * self.pool.nbytes // len(self.decoder.layers)
        return super().missing + room

    def take(self) -> None:
        # Not at the first step: a wake that lacks it is to fail, not the requests after it.
        super().take()
        self._renew()

    def _forget(self) -> None:
        """Graphs and their buffers: after sleeping, pool and weights lie elsewhere."""
        self._steps.clear()
        self._generation, self._memory = -1, None
        self._room = self.pool.buffer(0)

    def _renew(self) -> None:
        if self._generation == self.pool.generation:
            return
        self._forget()
        self._generation, self._room = self.pool.generation, self.pool.buffer(ROOM * self.pool.blocks)
        if self.pool.device.type == "cuda":
            self._memory = torch.cuda.graph_pool_handle()


def make(decoder: Decoder, planner: Planner, pool: KvPool) -> GraphCore:
    """A core that decodes with graphs."""
    return GraphCore(decoder, planner, pool)
