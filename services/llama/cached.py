"""The engine's usual way: continuous batching by steps over a paged KV cache.

Law: one thread calls it. Puts planner, pool, decoder and sampling together; a failure of a step costs the
sequences of that step, and their blocks are free again.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from services.faults import BadLogits, EngineFault, OutOfDeviceMemory
from services.kv.shape import ceil_div
from services.llama.batch import Batch, build
from services.llama.core import Outcome, is_out_of_memory
from services.llama.decoder import Decoder
from services.llama.planner import Plan, Planner
from services.llama.pool import KvPool
from services.llama.sampling import choose
from services.llama.sequence import Sequence
from services.llama.witness import fixed_ids, fixed_kv, told


class CachedCore:
    """See core.Core. steps: done since start."""

    def __init__(self, decoder: Decoder, planner: Planner, pool: KvPool) -> None:
        self.decoder, self.planner, self.pool = decoder, planner, pool
        self._window = decoder.config.window
        self.steps = 0

    def add(self, sequence: Sequence) -> None:
        self.planner.add(sequence)

    def reap(self) -> None:
        self.planner.reap()

    def busy(self) -> bool:
        return bool(self.planner.running or self.planner.waiting)

    def everyone(self) -> Iterable[Sequence]:
        return self.planner.everyone()

    def step(self) -> list[Outcome]:
        plan = self.planner.plan()
        self.steps += 1
        try:
            tokens, good = self._compute(plan)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            lost = [
                self._lose(s, OutOfDeviceMemory(f"a step ran out of memory: {error}")) for s in plan.sequences
            ]
            if self.pool.device.type == "cuda":
                torch.cuda.empty_cache()
            return lost
        self.planner.done(plan)
        return [self._outcome(*row) for row in zip(plan.sampled, tokens, good, strict=True)]

    @torch.inference_mode()
    def _compute(self, plan: Plan) -> tuple[list[int], list[bool]]:
        logits, sampled = self.forward(plan), plan.sampled
        if not sampled:
            return [], []
        return choose(logits, [s.sampling for s in sampled], [s.made for s in sampled])

    def forward(self, plan: Plan, batch: Batch | None = None) -> Tensor:
        """Logits of the rows that get a token. batch: of this plan, where it is there already."""
        whole = batch or build(plan, self.pool, self.decoder.dtype, self._window)
        return self.decoder.logits(whole, self.pool)

    @torch.inference_mode()
    def witness(self) -> Tensor:
        """Logits behind a fixed token, (1, vocabulary): the same as long as weights and KV memory are. Only
        while nothing runs.

        One step of one row, since a wake waits for it and more rows cost more (products of a matrix and a
        vector just read the weights). Before it in the pool lie made-up keys and values: so the pool is
        read, and queries and keys count, which a token that sees only itself can't tell.
        """
        config, pool = self.decoder.config, self.pool
        ids = fixed_ids(2, config.vocabulary)
        blocks = self.planner.blocks.take(ceil_div(len(ids), pool.block))
        try:
            behind = Sequence(ids, len(ids), 1, computed=1, blocks=blocks)
            made_up = fixed_kv(config.kv_heads, config.head_dim).to(pool.device, self.decoder.dtype)
            first = torch.tensor([blocks[0] * pool.block], device=pool.device)
            for layer in range(config.layers):
                pool.write(layer, first, made_up)
            batch = build(Plan(decodes=(behind,)), pool, self.decoder.dtype, self._window)
            return told(self.decoder.logits(batch, pool))
        finally:
            self.planner.blocks.give(blocks)

    def give_back(self) -> None:
        """Memory of the device that isn't needed while nothing runs. Its contents are lost."""
        self.pool.give_back()

    @property
    def missing(self) -> int:
        """Bytes that `take` will take."""
        return self.pool.nbytes - self.pool.held_bytes

    def take(self) -> None:
        """Have it again; fine when it is here."""
        if not self.pool.held_bytes:
            self.pool.take()

    def close(self) -> None:
        """All of it, for good."""
        self.give_back()
        self.pool.close()

    def _outcome(self, sequence: Sequence, token: int, good: bool) -> Outcome:
        if not good:
            # What it wrote may be NaN too, and would spoil whoever gets these blocks next.
            self.pool.wipe(sequence.blocks)
            return self._lose(sequence, BadLogits("the model gave NaN or infinite logits"))
        finish = sequence.push(token)
        if finish:
            self.planner.remove(sequence)
        return Outcome(sequence, token, finish)

    def _lose(self, sequence: Sequence, error: EngineFault) -> Outcome:
        self.planner.remove(sequence)
        return Outcome(sequence, error=error)
