"""What this device can at best: the ceilings that the other sections' figures are read against.

Law: one section; yields rows. Random data, never zeros: they run faster.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tests.bench.gpu_env import Env, timed_ms
from tests.bench.gpu_rows import row, spread


def section(env: Env) -> Iterator[dict[str, Any]]:
    size, side = (1 << 16, 64) if env.tiny or not env.cuda else (4 << 30, 8192)
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=env.device)
    target = torch.empty_like(source)
    ms = spread(timed_ms(env, lambda: target.copy_(source), 10)).p50
    yield row("copy on the device, read and written", 2 * size / ms / 1e6, "GB/s")
    source = target = torch.empty(0)
    a, b = (torch.randn(side, side, dtype=env.dtype, device=env.device) for _ in range(2))
    ms = spread(timed_ms(env, lambda: a @ b, 10)).p50
    yield row(f"matrix product {side}, {str(env.dtype)[6:]}", 2 * side**3 / ms / 1e9, "TFLOP/s")
    launch = torch.randn(16, device=env.device)
    ms = spread(timed_ms(env, lambda: launch.mul_(1.0), 100)).p50
    yield row("one small kernel after the other", ms * 1000, "us")


def facts(device: torch.device) -> dict[str, Any]:
    """Names and versions, for whoever reads the file later."""
    known: dict[str, Any] = {"torch": torch.__version__, "device": str(device)}
    if device.type == "cuda":
        it = torch.cuda.get_device_properties(device)
        known |= {
            "name": it.name,
            "memory_bytes": it.total_memory,
            "multiprocessors": it.multi_processor_count,
            "capability": f"{it.major}.{it.minor}",
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        }
    return known
