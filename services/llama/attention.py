"""Attention over the paged pool: the decoding rows all at once, each chunk of a prompt by itself.

Law: tensors only. Queries come as (T, heads, d); what is returned has the same shape. `Sdpa` is torch's own
kernels; on the CPU they read K and V strided, straight from the gathered blocks, and share KV heads without
copies.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor

from services.llama.batch import Batch, Decodes, Prefill
from services.llama.pool import KvPool


class Attention(ABC):
    """q (T, heads, d) and kv (T, 2, kv_heads, d) of this step; the pool holds these and all before."""

    def step(self, q: Tensor, kv: Tensor, batch: Batch, pool: KvPool, layer: int) -> Tensor:
        """All rows of a step."""
        parts = [self.decode(q[it.at : it.at + it.count], it, pool, layer) for it in batch.decodes]
        for it in batch.prefills:
            rows = slice(it.at, it.at + it.count)
            parts.append(self.prefill(q[rows], kv[rows], it, pool, layer))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @abstractmethod
    def whole(self, q: Tensor, kv: Tensor) -> Tensor:
        """One whole sequence without a cache, causal (and inside the window)."""

    @abstractmethod
    def decode(self, q: Tensor, it: Decodes, pool: KvPool, layer: int) -> Tensor:
        """The rows of one group of decoding sequences."""

    @abstractmethod
    def prefill(self, q: Tensor, kv: Tensor, it: Prefill, pool: KvPool, layer: int) -> Tensor:
        """The rows of one chunk."""


class Sdpa(Attention):
    """torch.nn.functional.scaled_dot_product_attention. window: 0 or tokens that a query sees."""

    def __init__(self, window: int = 0) -> None:
        self._window = window

    def whole(self, q: Tensor, kv: Tensor) -> Tensor:
        return self._causal(q, kv, self._window_mask(q))

    def _window_mask(self, q: Tensor) -> Tensor | None:
        count = q.shape[0]
        if not self._window or count <= self._window:
            return None
        seen = torch.ones((count, count), dtype=torch.bool, device=q.device).tril_()
        return seen.triu_(1 - self._window)

    @staticmethod
    def _causal(q: Tensor, kv: Tensor, mask: Tensor | None) -> Tensor:
        k, v = kv[:, 0].transpose(0, 1)[None], kv[:, 1].transpose(0, 1)[None]
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None], k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
        return out[0].transpose(0, 1).reshape(q.shape)

    def decode(self, q: Tensor, it: Decodes, pool: KvPool, layer: int) -> Tensor:
        k, v = pool.read(pool.gather(layer, it.blocks, it.buffer), it.count, q.dtype)
        return _attend(q[:, :, None], k, v, it.mask).reshape(q.shape)

    def prefill(self, q: Tensor, kv: Tensor, it: Prefill, pool: KvPool, layer: int) -> Tensor:
        if it.blocks is None or it.buffer is None:
            return self._causal(q, kv, None)
        k, v = pool.read(pool.gather(layer, it.blocks, it.buffer), 1, q.dtype)
        out = _attend(q.transpose(0, 1)[None], k, v, it.mask)
        return out[0].transpose(0, 1).reshape(q.shape)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """q (B, heads, Q, d), k and v (B, kv_heads, S, d), mask broadcast to (B, 1, Q, S)."""
    if not q.is_cuda or q.shape[1] == k.shape[1]:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
    # On CUDA no fast kernel takes a mask and shared KV heads at once: the heads of a group become queries.
    b, heads, queries, d = q.shape
    group = heads // k.shape[1]
    grouped = q.reshape(b, k.shape[1], group * queries, d)
    repeated = None if mask is None else mask.expand(b, 1, queries, k.shape[2]).repeat(1, 1, group, 1)
    return F.scaled_dot_product_attention(grouped, k, v, attn_mask=repeated).reshape(q.shape)
