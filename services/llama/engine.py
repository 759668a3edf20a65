"""The torch engine: continuous batching over a paged KV cache.

Law: puts the parts together; what a step does is in cached.py, what is computed next in planner.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from services.engine import EngineFacts, EngineStats
from services.faults import WakeFailed
from services.kv.shape import ceil_div
from services.llama.blocks import Blocks
from services.llama.cached import CachedCore
from services.llama.decoder import Decoder
from services.llama.flash import choose as choose_attention
from services.llama.graph import GraphCore
from services.llama.lifecycle import LlamaEngine
from services.llama.model import Model
from services.llama.planner import Planner
from services.llama.pool import KvPool, shape_of
from services.llama.settings import AUTO, DEFAULT_KV_TOKENS
from services.llama.witness import otherwise


class TorchEngine(LlamaEngine):
    """One model on one device."""

    name = "torch"

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._core: CachedCore | None = None
        self._expected: Tensor | None = None

    @property
    def kv_pool_bytes(self) -> int:
        """What the KV pool takes of the device while awake: 2·L·h_kv·d_head·bytes·block·blocks."""
        return self._core.pool.nbytes if self._core else 0

    def _describe(self) -> EngineFacts:
        settings = self.model.settings
        return EngineFacts(
            self.name,
            self.model.name,
            context=self.model.context,
            sequences=settings.max_sequences,
            kv_tokens=self._core.planner.blocks.count * settings.block if self._core else 0,
            kv_block=settings.block,
            kv_window=self.model.config.window,
            kv_chunk=settings.chunk,
            wake_proves=True,
            sleep_levels=(1, 2),
            weights_bytes=self.model.weights.nbytes if self._core else 0,
            device=str(self.model.device),
        )

    def stats(self) -> EngineStats:
        core, serving = self._core, self._serving
        if core is None or serving is None:
            return EngineStats()
        planner, pool = core.planner, core.pool
        device = self.model.device
        return EngineStats(
            running=len(planner.running),
            waiting=len(planner.waiting),
            kv_used=planner.blocks.used / planner.blocks.count,
            tokens=serving.tokens,
            extra={"kv_pool_bytes": float(pool.held_bytes), "steps": float(core.steps)},
            prompt_tokens=serving.prompt_tokens,
            preemptions=planner.preemptions,
            dead=serving.dead,
            fragmentation=fragmentation(device),
            memory_bytes=self.model.weights_bytes + pool.held_bytes,
        )

    def _build(self) -> CachedCore:
        settings, model = self.model.settings, self.model
        window = model.config.window
        attention = choose_attention(settings.attention, model.device, model.dtype, window)
        decoder = Decoder(model.config, model.weights.tensors, attention)
        pool = KvPool(model.config, self._blocks(), settings.block, model.kv_dtype, model.device)
        blocks = Blocks(pool.blocks, pool.block)
        planner = Planner(blocks, most=settings.max_sequences, chunk=settings.chunk, window=window)
        graphs = settings.graphs == "on" or (settings.graphs == AUTO and model.device.type == "cuda")
        self._core = GraphCore(decoder, planner, pool) if graphs else CachedCore(decoder, planner, pool)
        self._expected = self._core.witness()
        return self._core

    def _room(self) -> int:
        """What the whole pool holds; with a window, a sequence of any length may fit."""
        planner = self._ready_core().planner
        if planner.fits(self.model.context):
            return self.model.context
        return planner.blocks.count * planner.blocks.size

    def _blocks(self) -> int:
        settings = self.model.settings
        if settings.kv_memory_mb:
            shape = shape_of(self.model.config, self.model.kv_dtype, settings.block)
            return max(1, shape.pool_blocks(settings.kv_memory_mb << 20))
        return ceil_div(settings.kv_tokens or max(DEFAULT_KV_TOKENS, self.model.context), settings.block)

    def _needs(self) -> int:
        return self._ready_core().missing

    def _give_back(self) -> None:
        self._ready_core().give_back()

    def _take_back(self, level: int) -> None:
        core = self._ready_core()
        core.take()
        assert self._expected is not None
        if wrong := otherwise(self._expected, core.witness(), self.model.dtype):
            raise WakeFailed(wrong)

    def _end(self) -> None:
        core, self._core = self._core, None
        if core is not None:
            core.close()

    def _ready_core(self) -> CachedCore:
        if self._core is None:
            raise RuntimeError("the engine was not started")
        return self._core


def fragmentation(device: torch.device) -> float:
    """Share of the memory that torch's allocator reserved and nobody uses. The CPU has no such allocator."""
    if device.type != "cuda":
        return 0.0
    reserved = torch.cuda.memory_reserved(device)
    return 1 - torch.cuda.memory_allocated(device) / reserved if reserved else 0.0
