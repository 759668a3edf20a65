"""Attention by the flash_attn package, where it is installed and there is a GPU for it.

Law: the same door as attention.Sdpa. Half precision only. Its kernels know shared KV heads, lengths and the
window themselves, so no mask is read. The package's own paged cache wants blocks of 256 tokens; ours are
gathered as for Sdpa.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from torch import Tensor

from regions.cli.errors import UsageError
from services.llama.attention import Attention, Sdpa
from services.llama.batch import Decodes, Prefill
from services.llama.pool import KvPool
from services.llama.settings import AUTO

PACKAGE = "flash_attn"
HALVES = (torch.float16, torch.bfloat16)


class Kernels(Protocol):
    """The two functions of the package that we call; tensors are (batch, tokens, heads, d)."""

    def flash_attn_func(self, q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Tensor: ...

    def flash_attn_with_kvcache(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, **more: Any) -> Tensor: ...


class Flash(Attention):
    """window: 0 or tokens that a query sees."""

    def __init__(self, kernels: Kernels, window: int = 0) -> None:
        self._kernels = kernels
        # Counted without the query itself; -1 is all.
        self._seen = (window - 1, 0) if window else (-1, -1)

    def whole(self, q: Tensor, kv: Tensor) -> Tensor:
        return self._causal(q, kv[:, 0], kv[:, 1])

    def _causal(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Fewer queries than keys: they are the last ones."""
        more = {"causal": True, "window_size": self._seen}
        return self._kernels.flash_attn_func(q[None], k[None], v[None], **more)[0]

    def decode(self, q: Tensor, it: Decodes, pool: KvPool, layer: int) -> Tensor:
        k, v = pool.read(pool.gather(layer, it.blocks, it.buffer), it.count, q.dtype)
        more = {"cache_seqlens": it.lengths, "causal": True, "window_size": self._seen}
        found = self._kernels.flash_attn_with_kvcache(
            q[:, None], k.transpose(1, 2), v.transpose(1, 2), **more
        )
        return found[:, 0]

    def prefill(self, q: Tensor, kv: Tensor, it: Prefill, pool: KvPool, layer: int) -> Tensor:
        if it.blocks is None or it.buffer is None:
            return self.whole(q, kv)
        k, v = pool.read(pool.gather(layer, it.blocks, it.buffer), 1, q.dtype)
        return self._causal(q, k[0].transpose(0, 1)[: it.keys], v[0].transpose(0, 1)[: it.keys])


def choose(asked: str, device: torch.device, dtype: torch.dtype, window: int) -> Attention:
    """asked: "auto", "sdpa" or "flash". Raises UsageError where flash is asked for and can't be had."""
    able = device.type == "cuda" and dtype in HALVES
    there = find_spec(PACKAGE) is not None
    if asked == "flash" and not (able and there):
        why = "is not installed" if able else f"can't compute {dtype} on {device}"
        raise UsageError("engine option attention='flash'", f"{PACKAGE} {why}", "give attention=sdpa")
    if asked in (AUTO, "flash") and able and there:
        return Flash(import_module(PACKAGE), window)
    return Sdpa(window)
