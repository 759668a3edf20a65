"""What the sections of the GPU bench share: the device, how to time on it, random weights.

Law: imports torch and the standard library only (beside weir's own pure modules): the machine with the GPU
has nothing else of ours.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from mesh.clock import SystemClock
from tests.bench.gpu_rows import LLAMA_1B, TINY, Deadline

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Env:
    """device: cuda or cpu. tiny: small sizes, to see that everything runs. deadline: of the section."""

    device: torch.device
    tiny: bool
    deadline: Deadline

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.cuda else torch.float32

    @property
    def model(self) -> Mapping[str, Any]:
        """config.json of the model that is measured."""
        return TINY if self.tiny else LLAMA_1B


_clock = SystemClock()
now = _clock.monotonic


def sync(device: torch.device) -> None:
    """Until the device has done everything that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def tidy(device: torch.device) -> None:
    """Memory back to the driver, so that one section's leavings don't count in the next."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def timed_ms(env: Env, work: Callable[[], object], repeats: int, warm: int = 3) -> list[float]:
    """Milliseconds of each repeat on the device itself, by events; on the CPU by the clock."""
    for _ in range(warm):
        work()
    sync(env.device)
    if not env.cuda:
        return [_clocked_ms(work) for _ in range(repeats)]
    pairs = [(_event(), _event()) for _ in range(repeats)]
    for begin, end in pairs:
        begin.record()
        work()
        end.record()
    sync(env.device)
    return [begin.elapsed_time(end) for begin, end in pairs]


def wall_ms(env: Env, work: Callable[[], object], repeats: int, warm: int = 3) -> list[float]:
    """Milliseconds as the host sees them, device work included."""
    for _ in range(warm):
        work()
    found = []
    for _ in range(repeats):
        sync(env.device)
        begin = now()
        work()
        sync(env.device)
        found.append((now() - begin) * 1000)
    return found


def repeats_for(env: Env, one_ms: float, most: int, share: float) -> int:
    """As many as go into `share` of the section's time that is left; at least 3."""
    return max(3, min(most, int(env.deadline.left_s * 1000 * share / max(one_ms, 1e-3))))


def clocked(env: Env, work: Callable[[], T]) -> tuple[T, float]:
    """What it gives, and the seconds it took, device work included."""
    sync(env.device)
    begin = now()
    found = work()
    sync(env.device)
    return found, now() - begin


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _clocked_ms(work: Callable[[], object]) -> float:
    begin = now()
    work()
    return (now() - begin) * 1000


def tensors_of(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a Llama model's weights, as its files have them."""
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    wide, narrow = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for index in range(config["num_hidden_layers"]):
        at = f"model.layers.{index}."
        found |= {
            f"{at}self_attn.q_proj.weight": (wide, hidden),
            f"{at}self_attn.k_proj.weight": (narrow, hidden),
            f"{at}self_attn.v_proj.weight": (narrow, hidden),
            f"{at}self_attn.o_proj.weight": (hidden, wide),
            f"{at}mlp.gate_proj.weight": (inner, hidden),
            f"{at}mlp.up_proj.weight": (inner, hidden),
            f"{at}mlp.down_proj.weight": (hidden, inner),
            f"{at}input_layernorm.weight": (hidden,),
            f"{at}post_attention_layernorm.weight": (hidden,),
        }
    return found | {"model.norm.weight": (hidden,)}


def random_weights(env: Env, seed: int = 1) -> dict[str, Tensor]:
    """Seeded noise of the size that weights have; norms are ones. Never zeros: they run faster than data."""
    dice = torch.Generator(env.device).manual_seed(seed)
    made = {}
    for name, shape in tensors_of(env.model).items():
        if "norm" in name:
            made[name] = torch.ones(shape, dtype=env.dtype, device=env.device)
        else:
            drawn = torch.randn(shape, generator=dice, dtype=env.dtype, device=env.device)
            made[name] = drawn.mul_(0.02)
    return made


def first_line(error: BaseException) -> str:
    """Short enough for a row."""
    return str(error).splitlines()[0][:160] if str(error) else type(error).__name__
