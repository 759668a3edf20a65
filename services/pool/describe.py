"""What stands in a model's folder, for the snapshot: config, files with digests, the map of the tensors.

Law: reads, never changes; no torch. Weights are read once for their digest and not kept. Blocks (up to a
second for a large model): call it in a thread.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from regions.cli.errors import WeirError
from services.kv.config import ConfigError, shape_of
from services.pool.snapshot import ModelFile, ModelParts
from services.weights import header

WHOLE_BYTES = 2**30
"""Files up to this size are digested in full."""
PIECES, PIECE_BYTES = 64, 64 * 1024
_SAMPLING = ("temperature", "top_p", "top_k", "repetition_penalty", "eos_token_id", "bos_token_id")


def model_parts(folder: Path) -> ModelParts:
    """Raises WeirError naming the file that can't be read."""
    config = _json(folder / "config.json")
    files = sorted(path for path in folder.iterdir() if path.is_file())
    weights = [path for path in files if path.suffix == ".safetensors"]
    return ModelParts(
        folder=str(folder),
        config=config,
        files=tuple(ModelFile(path.name, path.stat().st_size, digest(path)) for path in files),
        tensors=tuple(row for path in weights for row in tensors(path)),
        kv=_kv(config),
        sampling=_sampling(folder / "generation_config.json"),
    )


def digest(path: Path) -> str:
    """`sha256:…` of the file, for a large one `sample:…` of its size, its ends and evenly spaced pieces."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            if size <= WHOLE_BYTES:
                return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()
            made = hashlib.sha256(str(size).encode())
            for number in range(PIECES):
                file.seek(max(0, size - PIECE_BYTES) * number // (PIECES - 1))
                made.update(file.read(PIECE_BYTES))
            return "sample:" + made.hexdigest()
    except OSError as error:
        raise WeirError(str(path), error.strerror or "can't be read") from error


def tensors(path: Path) -> Iterable[tuple[Any, ...]]:
    """(name, dtype, shape, file, begin, end) of each, by place; offsets count from the end of the header."""
    try:
        found = header.entries(path)
    except (ValueError, OSError) as error:
        raise WeirError(str(path), f"no safetensors file: {error}", "fetch the model again") from error
    return [(e.name, e.dtype, list(e.shape), path.name, e.begin, e.end) for e in found]


def _json(path: Path) -> Mapping[str, Any]:
    try:
        body = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise WeirError(str(path), f"can't be read: {error}", "fetch the model again (weir model)") from error
    if not isinstance(body, dict):
        raise WeirError(str(path), "is not a JSON object", "fetch the model again (weir model)")
    return body


def _kv(config: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        shape = asdict(shape_of(config))
    except (ConfigError, ValueError) as error:
        return {"unknown": str(error)}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in shape.items()}


def _sampling(path: Path) -> Mapping[str, Any]:
    if not path.exists():
        return {}
    body = _json(path)
    return {name: body[name] for name in _SAMPLING if name in body}
