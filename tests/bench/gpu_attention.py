"""Attention kernels: the flash kernels against the mathematics written out, forward and backward, and right.

Law: one section; yields rows. All kernels get the same random inputs of the same run; `math` is the peer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.bench.gpu_env import Env, first_line, repeats_for, tidy, timed_ms
from tests.bench.gpu_rows import AttentionCase, attention_cases, row, spread

PEER = "SDPA math"
MEMORY_SHARE = 0.6
"""A case whose written-out scores take more of the free memory than this is left out for `math`."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """call: (q, k, v), each (B, heads, T, d), to the causal attention. around: entered once for many calls,
    since choosing a backend costs the host as much as a short kernel runs."""

    name: str
    call: Callable[[Tensor, Tensor, Tensor], Tensor]
    around: Callable[[], AbstractContextManager[None]] = nullcontext


def section(env: Env) -> Iterator[dict[str, Any]]:
    kernels = tuple(known_kernels(env))
    yield from _correct(env, kernels)
    for case in attention_cases(tiny=env.tiny):
        env.deadline.check(1.0)
        yield from _case(env, case, kernels)
        tidy(env.device)


def known_kernels(env: Env) -> Iterator[Kernel]:
    """SDPA's own backends, the mathematics first, and the flash_attn package where it is."""
    yield _sdpa(PEER, SDPBackend.MATH)
    yield _sdpa("SDPA flash", SDPBackend.FLASH_ATTENTION)
    if not env.cuda:
        return
    yield _sdpa("SDPA cuDNN", SDPBackend.CUDNN_ATTENTION)
    try:
        from flash_attn import flash_attn_func  # type: ignore[import-not-found]
    except ImportError:
        return

    def packaged(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found: Tensor = flash_attn_func(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=True)
        return found.transpose(1, 2)

    yield Kernel("flash_attn", packaged)


def _sdpa(name: str, backend: SDPBackend) -> Kernel:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return Kernel(name, call, lambda: sdpa_kernel(backend))


def _inputs(env: Env, case: AttentionCase, seed: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    """q (B, heads, T, d), k and v (B, kv_heads, T, d), drawn anew for each case."""
    dice = torch.Generator(env.device).manual_seed(seed)

    def draw(heads: int) -> Tensor:
        shape = (case.batch, heads, case.tokens, case.head_dim)
        return torch.randn(shape, generator=dice, dtype=env.dtype, device=env.device)

    return draw(case.heads), draw(case.kv_heads), draw(case.kv_heads)


def _correct(env: Env, kernels: Sequence[Kernel]) -> Iterator[dict[str, Any]]:
    """Relative error against float64, output and gradients; bfloat16 inputs allow about 1e-2."""
    case = AttentionCase(2, 65, 4, 2, 16) if env.tiny else AttentionCase(2, 513, 8, 2, 128)
    inputs = _inputs(env, case, seed=11)
    # Of every place another size: a gradient of ones would hide an output in the wrong order.
    weights = torch.linspace(-1, 1, inputs[0].numel(), device=env.device).view_as(inputs[0]).to(env.dtype)
    right = _with_gradients(kernels[0], [t.double() for t in inputs], weights.double())
    for kernel in kernels:
        metric = f"{kernel.name}: relative error, output and gradients"
        try:
            found = _with_gradients(kernel, inputs, weights)
        except RuntimeError as error:
            yield row(metric, None, "", note=f"doesn't run here: {first_line(error)}")
            continue
        worst = max(_error(a, b) for a, b in zip(found, right, strict=True))
        yield row(metric, worst, "", goal="<= 0.02")


def _with_gradients(kernel: Kernel, inputs: Sequence[Tensor], weights: Tensor) -> list[Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    with kernel.around():
        out = kernel.call(leaves[0], leaves[1], leaves[2])
        return [out.detach(), *torch.autograd.grad(out, leaves, weights)]


def _error(found: Tensor, right: Tensor) -> float:
    difference = (found.double() - right.double()).norm() / right.double().norm()
    return float(difference)


def _case(env: Env, case: AttentionCase, kernels: Sequence[Kernel]) -> Iterator[dict[str, Any]]:
    inputs = _inputs(env, case)
    for backward in (False, True) if case.backward else (False,):
        flops = case.flops(backward=False) + (case.flops(backward=True) if backward else 0.0)
        peer: float | None = None
        for kernel in kernels:
            metric = f"{'forward + backward' if backward else 'forward'} {case.name}: {kernel.name}"
            if kernel.name == PEER and not _roomy(env, case, backward=backward):
                yield row(metric, None, "ms", note="its scores don't fit here")
                continue
            try:
                ms = _time(env, kernel, inputs, backward=backward)
            except RuntimeError as error:
                yield row(metric, None, "ms", note=f"doesn't run: {first_line(error)}")
                tidy(env.device)
                continue
            rate = f"{flops / ms / 1e9:.1f} TFLOP/s"
            beside = PEER if peer is not None else ""
            yield row(metric, ms, "ms", peer=beside, peer_value=peer, note=rate)
            peer = ms if kernel.name == PEER else peer


def _time(env: Env, kernel: Kernel, inputs: Sequence[Tensor], *, backward: bool) -> float:
    """Median milliseconds."""
    env.deadline.check()
    with kernel.around():
        if not backward:
            with torch.no_grad():
                return _median(env, lambda: kernel.call(inputs[0], inputs[1], inputs[2]))
        leaves = [t.detach().requires_grad_() for t in inputs]
        gradient = torch.randn_like(inputs[0])
        return _median(
            env, lambda: torch.autograd.grad(kernel.call(leaves[0], leaves[1], leaves[2]), leaves, gradient)
        )


def _median(env: Env, work: Callable[[], object]) -> float:
    one = timed_ms(env, work, 1, warm=2)[0]
    count = repeats_for(env, one, most=5 if env.tiny else 30, share=0.02)
    return spread(timed_ms(env, work, count, warm=0)).p50


def _roomy(env: Env, case: AttentionCase, *, backward: bool) -> bool:
    if not env.cuda:
        return True
    free, _ = torch.cuda.mem_get_info(env.device)
    return case.math_bytes * (3 if backward else 1.5) < free * MEMORY_SHARE
