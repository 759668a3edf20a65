"""Which models `weir model prepare` knows, as rows of known.toml.

Law: parses what it is given; reads one file beside it and nothing else.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from regions.cli.errors import UsageError

FILE = Path(__file__).with_name("known.toml")


@dataclass(frozen=True, slots=True)
class Known:
    """One model. package, version: of a wheel that holds `member`, a GGUF file with this sha256. megabytes:
    on disk when prepared.
    """

    name: str
    summary: str
    package: str
    version: str
    member: str
    sha256: str
    licence: str
    megabytes: int


def known(text: str | None = None) -> Mapping[str, Known]:
    """All rows by name. text: TOML to read instead of known.toml. Raises ValueError naming the row."""
    tables = tomllib.loads(FILE.read_text("utf-8") if text is None else text)
    return {name: _row(name, body) for name, body in tables.items()}


def _row(name: str, body: Mapping[str, Any]) -> Known:
    wanted = {f.name: f.type for f in fields(Known) if f.name != "name"}
    if body.keys() != wanted.keys():
        raise ValueError(f"model {name!r}: wanted the fields {', '.join(sorted(wanted))}")
    for field, kind in wanted.items():
        if type(body[field]).__name__ != kind:
            raise ValueError(f"model {name!r}: {field} is no {kind}")
    return Known(name=name, **body)


def row(name: str) -> Known:
    """The row of this name. Raises UsageError that says which there are."""
    rows = known()
    if name not in rows:
        raise UsageError(f"model {name!r}", "unknown", f"known: {', '.join(sorted(rows))}")
    return rows[name]
