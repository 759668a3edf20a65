"""Rotary position embedding, in the layout of Hugging Face (halves, not pairs).

Law: pure functions of config and positions.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from services.llama.config import Rope


def frequencies(rope: Rope, head_dim: int) -> Tensor:
    """(head_dim / 2,) float32: radians per position.

    llama3: long waves are slowed by `factor`, short ones stay, those between go over smoothly (Llama 3.1).
    """
    plain = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind != "llama3":
        return plain
    waves = 2 * math.pi / plain
    turns = rope.original_context / waves
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    between = (1 - smooth) * plain / rope.factor + smooth * plain
    slowed = torch.where(waves > rope.original_context / rope.low_freq_factor, plain / rope.factor, between)
    return torch.where(waves < rope.original_context / rope.high_freq_factor, plain, slowed)


def table(rope: Rope, head_dim: int, positions: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(positions, 2, head_dim): cosine, and sine with the sign that `rotate` needs folded in."""
    angles = torch.arange(positions).float()[:, None] * frequencies(rope, head_dim)
    cos, sin = angles.cos(), angles.sin()
    whole = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1)
    return whole.to(device=device, dtype=dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (T, heads, d), cos and sin (T, 1, d); a new tensor. The halves are swapped, the sign is in `sin`."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)
