"""S17: model weights from safetensors into memory: planned, in parallel, checked; parked and woken.

Law: importing this package, or its pure modules (plan), imports no torch: only `open_weights` does.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from services.weights.held import Weights

__all__ = ["open_weights"]


def open_weights(
    folder: Path,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    progress: Callable[[int, int], None] | None = None,
) -> Weights:
    """All weights of the model in `folder`, in memory on `device`, floats as `dtype` ("float32", "bfloat16",
    "float16"). progress: called with (bytes done, bytes in all), from the calling thread. Blocks.

    Raises WeirError (UsageError for an unknown dtype) that names the shard, the tensor and the way out.
    """
    from services.weights.held import open_held

    return open_held(folder, device=device, dtype=dtype, progress=progress)
