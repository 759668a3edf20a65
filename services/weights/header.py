"""The header of a safetensors file: which tensors lie where in it.

Law: reads the beginning of one file, never weights, and needs no library for it: commands and processes that
load no weights look at them too. Whoever loads weights has them checked by safetensors (folder.py).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

LENGTH = 8
"""Bytes of the number in front: how long the header is."""
MOST = 100 * 2**20
"""Longest header, as safetensors itself limits it."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor. begin, end: bytes counted from the end of the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def entries(path: Path) -> tuple[Entry, ...]:
    """All tensors of the file, by place. Raises OSError, and ValueError for what is no header."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(LENGTH), "little")
        if not 0 < size <= MOST:
            raise ValueError("its header has an impossible size")
        raw = file.read(size)
    try:
        rows = {name: row for name, row in json.loads(raw).items() if name != "__metadata__"}
        found = [
            Entry(name, row["dtype"], tuple(row["shape"]), *map(int, row["data_offsets"]))
            for name, row in rows.items()
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"its header makes no sense: {error}") from error
    return tuple(sorted(found, key=lambda entry: entry.begin))
