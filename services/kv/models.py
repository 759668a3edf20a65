"""The config.json that a name stands for, and the size of the weights beside it.

Law: reads small files, no weights: of a safetensors file only its size and the length of its header.
A name is, in this order: a path, a model of the store, a published shape.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regions.cli.errors import UsageError
from services.kv.config import ConfigError, weights_bytes
from services.kv.published import PUBLISHED
from services.models.store import find

CONFIG = "config.json"
_MAX_CONFIG = 1 << 20


@dataclass(frozen=True, slots=True)
class Described:
    """source: where the config is from, for people. weights: bytes, None when nobody can tell."""

    name: str
    source: str
    config: Mapping[str, Any]
    weights: int | None


def describe(name: str) -> Described:
    """The model of this name. Raises UsageError with the way out."""
    if not name.strip():
        raise UsageError("--model", "empty", "name a model, a folder or a config.json")
    path = Path(name).expanduser()
    if path.exists():
        return _of_path(name, path)
    published = PUBLISHED.get(name.lower())
    try:
        return _of_path(name, find(name))
    except UsageError as error:
        if published is None:
            known = f"published shapes: {', '.join(PUBLISHED)}"
            raise UsageError(error.what, error.why, f"{error.way_out}; {known}") from None
    return Described(name, "published shape", published, weights_bytes(published))


def _of_path(name: str, path: Path) -> Described:
    file = path / CONFIG if path.is_dir() else path
    config = _read(file)
    weights = _files_bytes(file.parent) if file.name == CONFIG else None
    if weights is None:
        try:
            weights = weights_bytes(config)
        except (ConfigError, ValueError):
            weights = None  # only needed where they are counted; the caller says so then
    return Described(name, str(file), config, weights)


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


def _files_bytes(folder: Path) -> int | None:
    """Bytes of all tensors in the folder's safetensors files; None where there are none."""
    sizes = []
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            header = int.from_bytes(stream.read(8), "little")
        sizes.append(max(0, file.stat().st_size - 8 - header))
    return sum(sizes) if sizes else None
