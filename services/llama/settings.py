"""How a torch engine is to run: its options, read from text.

Law: pure; imports no torch. What only the machine can tell (is there a GPU) is decided at start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from regions.cli.errors import UsageError
from services.kv.shape import DEFAULT_BLOCK, dtype_name

AUTO = "auto"
MODES = ("cached", "layerwise")
WEIGHT_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Settings:
    """dtype, kv_dtype: torch's names, or "auto": of weights float32 on a CPU and bfloat16 on a GPU, of the KV
    cache that of the weights. device: "auto" is the first GPU, or the CPU. kv_tokens: size of the KV cache,
    0: as kv_memory_mb (MiB) says, or DEFAULT_KV_TOKENS. max_sequences: at once. block: tokens per KV block.
    chunk: prompt tokens computed in one step. threads: of the CPU, 0: one per core. graphs: CUDA graphs for
    decoding: "auto" is on a GPU; "on" without a GPU runs the same buffers without a capture. context: 0: the
    model's own. seed: added to each request's.
    """

    dtype: str = AUTO
    kv_dtype: str = AUTO
    device: str = AUTO
    kv_tokens: int = 0
    kv_memory_mb: int = 0
    max_sequences: int = 16
    block: int = DEFAULT_BLOCK
    chunk: int = 512
    threads: int = 0
    context: int = 0
    seed: int = 0
    mode: str = MODES[0]
    graphs: str = AUTO
    attention: str = AUTO


DEFAULT_KV_TOKENS = 16_384

_LIMITS: Mapping[str, tuple[int, int]] = {
    "kv_tokens": (0, 2**40),
    "kv_memory_mb": (0, 2**40),
    "max_sequences": (1, 4096),
    "block": (1, 4096),
    "chunk": (1, 2**20),
    "threads": (0, 1024),
    "context": (0, 2**30),
    "seed": (0, 2**63),
}
_CHOICES: Mapping[str, tuple[str, ...]] = {
    "mode": MODES,
    "graphs": (AUTO, "on", "off"),
    "attention": (AUTO, "sdpa", "flash"),
}


def parse(options: Mapping[str, str]) -> Settings:
    """Settings from text. Raises UsageError naming the option."""
    known = [f.name for f in fields(Settings)]
    for name in options:
        if name not in known:
            raise UsageError(f"engine option {name!r}", "unknown to torch", f"known: {', '.join(known)}")
    if options.get("kv_tokens") and options.get("kv_memory_mb"):
        raise UsageError("engine options kv_tokens and kv_memory_mb", "say the same thing twice", "give one")
    values: dict[str, Any] = {name: _reader(name)(name, text) for name, text in options.items()}
    return Settings(**values)


def _reader(name: str) -> Callable[[str, str], Any]:
    if name in _LIMITS:
        return _number
    if name in _CHOICES:
        return _choice
    return _device if name == "device" else _dtype


def _number(name: str, text: str) -> int:
    low, high = _LIMITS[name]
    try:
        value = int(text)
    except ValueError:
        raise UsageError(f"engine option {name}={text!r}", "not a whole number") from None
    if not low <= value <= high:
        raise UsageError(f"engine option {name}={text!r}", "out of range", f"from {low} to {high}")
    return value


def _choice(name: str, text: str) -> str:
    if text not in _CHOICES[name]:
        raise UsageError(f"engine option {name}={text!r}", "unknown", f"known: {', '.join(_CHOICES[name])}")
    return text


def _dtype(name: str, text: str) -> str:
    if text == AUTO:
        return text
    try:
        found = dtype_name(text)
    except ValueError as error:
        raise UsageError(f"engine option {name}={text!r}", str(error)) from None
    if name == "dtype" and found not in WEIGHT_DTYPES:
        known = ", ".join(WEIGHT_DTYPES)
        raise UsageError(f"engine option {name}={text!r}", "no type for weights here", f"known: {known}")
    return found


def _device(name: str, text: str) -> str:
    kind, _, index = text.partition(":")
    if kind not in (AUTO, "cpu", "cuda") or (index and (kind != "cuda" or not index.isdigit())):
        raise UsageError(f"engine option {name}={text!r}", "unknown", "known: auto, cpu, cuda, cuda:0, ...")
    return text
