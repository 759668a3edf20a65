"""intentions/catalog.yaml → intentions.

Law: reads one file, strict; past this door there are only frozen `intentions.model` values.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from intentions.model import WILDCARD, Action, Intention
from regions.yamlfile import DataFileError, Marked, Problem, StrictModel, read_marked

MAX_DESCRIPTION = 512
"""Consul refuses longer ones."""

_SERVICE = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


def is_service_name(text: str) -> bool:
    """Whether `text` can be a service in the mesh (a DNS label, since it becomes part of an SNI)."""
    return _SERVICE.fullmatch(text) is not None


def _party(text: str) -> str:
    if text != WILDCARD and not is_service_name(text):
        hint = '; "*" stands for all services only on its own' if WILDCARD in text else ""
        raise ValueError(f'must be a service name (lower-case letters, digits, "-") or "*"{hint}')
    return text


Party = Annotated[str, AfterValidator(_party)]


class IntentionRow(StrictModel):
    source: Party
    destination: Party
    action: Literal["allow", "deny"]
    description: str = Field(default="", max_length=MAX_DESCRIPTION)

    def row(self) -> Intention:
        return Intention(self.destination, self.source, Action(self.action), self.description)


class CatalogFile(StrictModel):
    intentions: list[IntentionRow]


def default_file() -> Path:
    """`./intentions/catalog.yaml` when it is there, else the one that ships with weir."""
    here = Path("intentions/catalog.yaml")
    return here if here.is_file() else Path(__file__).parent / "catalog.yaml"


def load_intentions(path: Path) -> tuple[Intention, ...]:
    """All rows, sorted by destination and source. Raises DataFileError with every problem found."""
    marked = read_marked(path, CatalogFile)
    problems = list(_twice(marked))
    if problems:
        raise DataFileError(problems)
    return tuple(sorted(row.row() for row in marked.value.intentions))


def _twice(marked: Marked[CatalogFile]) -> Iterator[Problem]:
    first: dict[tuple[str, str], int] = {}
    for number, row in enumerate(marked.value.intentions):
        pair = (row.source, row.destination)
        if pair in first:
            line = marked.lines[("intentions", first[pair])]
            reason = f"{row.source} -> {row.destination} is there already, on line {line}"
            yield marked.problem(("intentions", number), reason)
        else:
            first[pair] = number
