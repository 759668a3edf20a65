"""The config.json that a name stands for, and the size of the weights beside it.

Law: reads small files and the headers of safetensors files, never weights; imports no library for them.
A name is, in this order: a path, a model of the store, a published shape.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regions.cli.errors import UsageError
from services.kv.config import ConfigError, parameters, weights_dtype
from services.kv.published import PUBLISHED
from services.kv.shape import DTYPE_BYTES
from services.models.store import find
from services.weights import header

CONFIG = "config.json"
_MAX_CONFIG = 1 << 20
_FLOATS = {"F64", "F32", "F16", "BF16"}
"""Types that an engine turns into its own when it loads them."""


@dataclass(frozen=True, slots=True)
class Described:
    """source: where the config is from, for people. weights: bytes in the type that the engine runs in, None
    when nobody can tell."""

    name: str
    source: str
    config: Mapping[str, Any]
    weights: int | None


def describe(name: str, dtype: str = "auto") -> Described:
    """The model of this name. dtype: torch's name of the type that it is run in, "auto": as it was published.
    Raises UsageError with the way out.
    """
    if not name.strip():
        raise UsageError("--model", "empty", "name a model, a folder or a config.json")
    path = Path(name).expanduser()
    if path.exists():
        return _of_path(name, path, dtype)
    published = PUBLISHED.get(name.lower())
    try:
        return _of_path(name, find(name), dtype)
    except UsageError as error:
        if published is None:
            known = f"published shapes: {', '.join(PUBLISHED)}"
            raise UsageError(error.what, error.why, f"{error.way_out}; {known}") from None
    return Described(name, "published shape", published, _formula(published, dtype))


def _of_path(name: str, path: Path, dtype: str) -> Described:
    file = path / CONFIG if path.is_dir() else path
    config = _read(file)
    counted = _files_bytes(file.parent, dtype) if file.name == CONFIG else None
    return Described(name, str(file), config, _formula(config, dtype) if counted is None else counted)


def _formula(config: Mapping[str, Any], dtype: str) -> int | None:
    """None where there is none: only who counts the weights must know, and is told then."""
    try:
        return parameters(config) * DTYPE_BYTES[weights_dtype(config) if dtype == "auto" else dtype]
    except (ConfigError, ValueError):
        return None


def _read(file: Path) -> Mapping[str, Any]:
    try:
        raw = file.read_bytes()[:_MAX_CONFIG]
        config = json.loads(raw)
    except OSError as error:
        raise UsageError(
            str(file), error.strerror or "can't be read", "name a folder with a config.json"
        ) from None
    except ValueError:
        raise UsageError(str(file), "not JSON", "name a model's config.json or the folder it is in") from None
    if not isinstance(config, dict):
        raise UsageError(str(file), "not a JSON object", "name a model's config.json")
    return config


def _files_bytes(folder: Path, dtype: str) -> int | None:
    """Bytes of all tensors in the folder's safetensors files; None where there are none."""
    files = sorted(folder.glob("*.safetensors"))
    return sum(_tensors_bytes(file, dtype) for file in files) if files else None


def _tensors_bytes(file: Path, dtype: str) -> int:
    try:
        found = header.entries(file)
    except OSError as error:
        raise UsageError(str(file), error.strerror or "can't be read") from None
    except ValueError:
        way_out = "weir model verify, or give --weights SIZE"
        raise UsageError(str(file), "its header is no safetensors header", way_out) from None
    return sum(
        math.prod(e.shape) * DTYPE_BYTES[dtype] if dtype != "auto" and e.dtype in _FLOATS else e.end - e.begin
        for e in found
    )
