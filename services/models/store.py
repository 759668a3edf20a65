"""Where models lie: a name or a path → a folder with config.json, weights and tokenizer.

Law: looks, never writes. A folder is a model when it holds config.json; whether its weights are sound is for
the loader and `weir model verify` to say.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mesh.tools import cache_dir
from regions.cli.errors import UsageError
from services.models.catalog import known

CONFIG = "config.json"
ORIGIN = "weir.json"
"""What `prepare` writes last: where the model came from. Its name says that the folder is whole."""


@dataclass(frozen=True, slots=True)
class Stored:
    """One model in the store. origin: what weir.json says, empty where somebody put the folder there."""

    name: str
    path: Path
    nbytes: int
    origin: Mapping[str, str]


def models_dir(environ: Mapping[str, str] | None = None) -> Path:
    """The store's folder; it may not exist yet."""
    return cache_dir(environ) / "models"


def find(name_or_path: str | Path, environ: Mapping[str, str] | None = None) -> Path:
    """The folder of a model: a name in the store, or a path. Raises UsageError with the way out."""
    text = str(name_or_path)
    if _is_path(text):
        return _folder(Path(text).expanduser())
    place = models_dir(environ) / text
    if (place / CONFIG).is_file():
        return place
    if text in known():
        raise UsageError(f"model {text!r}", "not on this machine yet", f"weir model prepare {text}")
    if Path(text).is_dir():
        return _folder(Path(text))
    names = ", ".join(sorted({*known(), *(m.name for m in stored(environ))}))
    why = "neither a known name nor a folder"
    raise UsageError(f"model {text!r}", why, f"known: {names}; or give a path")


def _is_path(text: str) -> bool:
    return os.sep in text or text.startswith("~") or text in ("", ".", "..")


def _folder(path: Path) -> Path:
    if not path.is_dir():
        raise UsageError(f"model {str(path)!r}", "no such folder", "give a folder that holds config.json")
    if not (path / CONFIG).is_file():
        raise UsageError(f"model {str(path)!r}", f"holds no {CONFIG}", "give the folder of a model")
    return path.resolve()


def stored(environ: Mapping[str, str] | None = None) -> tuple[Stored, ...]:
    """All models in the store, by name."""
    place = models_dir(environ)
    folders = sorted(p for p in place.glob("[!.]*") if (p / CONFIG).is_file()) if place.is_dir() else []
    return tuple(Stored(p.name, p, _size(p), origin(p)) for p in folders)


def _size(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.iterdir() if p.is_file())


def origin(folder: Path) -> Mapping[str, str]:
    """What weir.json of this folder says, empty where there is none. Raises UsageError when it is no JSON."""
    path = folder / ORIGIN
    if not path.is_file():
        return {}
    try:
        body = json.loads(path.read_text("utf-8"))
        return {str(k): str(v) for k, v in body.items()}
    except (ValueError, AttributeError) as error:
        way_out = f"remove {folder} and prepare the model again"
        raise UsageError(str(path), f"can't be read: {error}", way_out) from error
