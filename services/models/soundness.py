"""Is a model's folder as it was prepared, and can what lies beside its weights be read at all?

Law: reads, never writes. Compares sums where there are any; a folder from elsewhere has none, so its config
and tokenizer are parsed instead. What an engine makes of them is the engine's to say.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from services.models.store import CONFIG, origin
from services.weights import faults, sums

TOKENIZER = "tokenizer.json"


def verify(folder: Path) -> dict[str, Any]:
    """Counts and a verdict. Reads everything. Raises WeightsError naming the file that is wrong."""
    _parsed(folder / CONFIG)
    report = sums.verify(folder)
    tokenizer = folder / TOKENIZER
    if tokenizer.exists():
        _parsed(tokenizer)
    elif origin(folder):
        raise faults.WeightsError(f"file {TOKENIZER}", f"not in {folder}, where `weir model prepare` put it")
    return report


def _parsed(path: Path) -> None:
    try:
        body = json.loads(path.read_bytes())
    except OSError as error:
        raise faults.unreadable(path, error) from error
    except ValueError as error:
        raise faults.WeightsError(f"file {path.name}", f"is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise faults.WeightsError(f"file {path.name}", f"holds a {type(body).__name__}, not an object")
