"""From logits to tokens: greedy, or drawn with dice that depend on the sequence alone.

Law: the same logits, Sampling and index give the same token, whoever else is in the batch: the dice are a
hash of (seed, sample, index), not a generator's state.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from services.llama.sequence import Sampling

NUCLEUS = 256
"""Candidates sorted at first for top_p; all of the vocabulary only where these aren't enough."""


def dice(sampling: Sampling, index: int) -> float:
    """A number of [0, 1): the throw for the `index`th token of a sequence."""
    text = b"%d\0%d\0%d" % (sampling.seed, sampling.sample, index)
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") / 2**64


def choose(logits: Tensor, how: Seq[Sampling], indices: Seq[int]) -> tuple[list[int], list[bool]]:
    """A token per row of logits (B, vocabulary), and whether the row's logits were all finite.

    indices: which token of its sequence each will be. A row that wasn't finite gets some token.
    """
    tokens = logits.argmax(-1)
    # One pass instead of four: a sum is finite only if all its terms are.
    good = logits.sum(-1, dtype=torch.float32).isfinite()
    drawn = [row for row, s in enumerate(how) if s.temperature > 0]
    if drawn:
        rows = torch.tensor(drawn, device=logits.device)
        throws = [dice(how[row], indices[row]) for row in drawn]
        tokens[rows] = _draw(logits[rows], [how[row] for row in drawn], throws)
    packed = torch.stack((tokens, good.to(tokens.dtype))).tolist()
    return packed[0], [bool(g) for g in packed[1]]


def _draw(logits: Tensor, how: Seq[Sampling], throws: Seq[float]) -> Tensor:
    """Inverse transform: the token in whose share of the probabilities the throw falls.

    Which way a row goes must depend on the row alone: the ways lay the shares out in different orders, so
    that the same throw means another token.
    """
    device = logits.device
    heat = torch.tensor([s.temperature for s in how], device=device)[:, None]
    # A tiny temperature would overflow: shifted by the largest logit, all are ≤ 0 and the best stays 0.
    shifted = logits.float() - logits.float().amax(-1, keepdim=True)
    shares = torch.softmax(shifted / heat.clamp_min(1e-6), -1).nan_to_num_(0.0)
    top_p = torch.tensor([s.top_p for s in how], device=device, dtype=torch.float64)[:, None]
    throw = torch.tensor(throws, device=device, dtype=torch.float64)[:, None]
    found = torch.empty(len(how), dtype=torch.int64, device=device)
    whole = torch.tensor([s.top_p >= 1 for s in how], device=device)
    if bool(whole.any()):
        found[whole] = _pick(shares[whole].double(), throw[whole])
    part = ~whole
    if bool(part.any()):
        found[part] = _nucleus(shares[part], top_p[part], throw[part])
    return found


def _nucleus(shares: Tensor, top_p: Tensor, throw: Tensor) -> Tensor:
    """Draw among the likeliest tokens that together reach top_p."""
    best, order = shares.topk(min(NUCLEUS, shares.shape[-1]), -1)
    found = _pick_sorted(best, order, top_p, throw)
    flat = best.double().sum(-1) < top_p[:, 0]
    if bool(flat.any()):
        best, order = shares[flat].sort(-1, descending=True)
        found[flat] = _pick_sorted(best, order, top_p[flat], throw[flat])
    return found


def _pick_sorted(best: Tensor, order: Tensor, top_p: Tensor, throw: Tensor) -> Tensor:
    best = best.double()
    # A token stays while those before it don't yet reach top_p: the first always does.
    kept = best.masked_fill(best.cumsum(-1) - best >= top_p, 0.0)
    return order.gather(-1, _pick(kept, throw)[:, None])[:, 0]


def _pick(shares: Tensor, throw: Tensor) -> Tensor:
    """Index per row; shares needn't add up to 1. Never one without a share, whatever rounding does."""
    reached = shares.cumsum(-1)
    at = torch.searchsorted(reached, throw * reached[:, -1:], right=True)[:, 0]
    last = (shares > 0).long().mul_(torch.arange(shares.shape[-1], device=shares.device)).amax(-1)
    return torch.minimum(at, last)
