"""What may be wrong with files of weights, each said with the shard, the figures and the way out.

Law: makes errors, looks at nothing.
"""

from __future__ import annotations

from pathlib import Path

from regions.cli.errors import WeirError

SUFFIX = ".safetensors"
AGAIN = "bring the model again: `weir model prepare NAME`, or copy the folder anew"


class WeightsError(WeirError):
    """The weights can't be loaded. shard: name of the file, "" where it is about the folder."""

    def __init__(self, what: str, why: str, way_out: str = AGAIN, *, shard: str = "") -> None:
        self.shard = shard
        super().__init__(what, why, way_out)


def missing(path: Path, tensors: int, index: str) -> WeightsError:
    return WeightsError(
        f"shard {path.name}", f"not in {path.parent}; {index} puts {tensors} tensor(s) there", shard=path.name
    )


def truncated(path: Path, expected: int, actual: int, tensor: str = "") -> WeightsError:
    inside = f"; the first tensor that is not whole: {tensor}" if tensor else ""
    how = "cut off" if actual < expected else "too long"
    why = f"{how}: {actual} bytes, its header says {expected}{inside}"
    return WeightsError(f"shard {path.name}", why, shard=path.name)


def corrupt_header(path: Path, detail: str) -> WeightsError:
    return WeightsError(f"shard {path.name}", f"its header can't be read: {detail}", shard=path.name)


def bad_sum(path: Path, part: str, expected: str, actual: str) -> WeightsError:
    why = f"{part} changed on disk: checksum {actual}, should be {expected}"
    return WeightsError(_kind(path), why, shard=path.name)


def bad_dtype(path: Path, tensor: str, dtype: str, known: str) -> WeightsError:
    way_out = "use a copy of the model in bfloat16, float16 or float32, or an engine that knows the format"
    why = f"tensor {tensor} is {dtype}; we read {known}"
    return WeightsError(f"shard {path.name}", why, way_out, shard=path.name)


def unreadable(path: Path, error: OSError | ValueError) -> WeightsError:
    reason = getattr(error, "strerror", None) or str(error)
    way_out = "check the disk (dmesg) and the file's permissions"
    return WeightsError(_kind(path), f"can't be read: {reason}", way_out, shard=path.name)


def _kind(path: Path) -> str:
    return f"{'shard' if path.suffix == SUFFIX else 'file'} {path.name}"
