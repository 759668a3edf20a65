"""Is it the same model as before it slept? Logits of a fixed prompt, compared.

Law: pure; tensors in, words out. Logits and not tokens: a tensor may be lost and the likeliest token stay the
same.
"""

from __future__ import annotations

import torch
from torch import Tensor

IDS = (1, 7920, 15839, 23758, 31677, 39596, 47515, 55434)
"""A fixed prompt: far apart, by remainder in a smaller vocabulary."""
TOLERANCE, COARSE = {torch.float32: 1e-3}, 0.02
"""Relative; the other one for types of 16 bits. The same kernels on the same shapes give the same bits; only
where others are chosen after a wake is anything rounded otherwise. Of SmolLM2 in bf16 each tensor that is
zeroed shows by 0.07 or more (`weir bench wake`).
"""


def fixed_ids(count: int, vocabulary: int) -> list[int]:
    """The first ids of it."""
    return [it % vocabulary for it in IDS[:count]]


def fixed_kv(kv_heads: int, head_dim: int) -> Tensor:
    """Keys and values of one token that never was, (1, 2, kv_heads, head_dim)."""
    return torch.randn((1, 2, kv_heads, head_dim), generator=torch.Generator().manual_seed(1))


def told(logits: Tensor) -> Tensor:
    """What is kept of them: in host memory, as floats."""
    return logits.detach().to("cpu", torch.float32, copy=True)


def off_by(expected: Tensor, found: Tensor) -> float:
    """Relative to what was expected; NaN where `found` holds one."""
    return float((found - expected).norm() / expected.norm())


def otherwise(expected: Tensor, found: Tensor, dtype: torch.dtype) -> str:
    """What is wrong with `found`, "" when it is what was expected. dtype: of the computation."""
    off = off_by(expected, found)
    # Written so that NaN is wrong too.
    if off <= TOLERANCE.get(dtype, COARSE):
        return ""
    return f"the fixed prompt is answered otherwise: its logits are off by {off:.2%} from before sleeping"
