"""Fallback rules from a YAML file.

Law: reads one file, strictly; imported only when a file is named (pydantic costs an executor 200 ms).
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from regions.yamlfile import DataFileError, Problem, StrictModel, read_marked
from services.fallback.rules import Reason, Rule

SHIPPED = Path(__file__).with_name("rules.yaml")


class _Rule(StrictModel):
    when: Literal["sequence_length", "fragmentation", "engine_error", "queue_full"]
    over: float | int = 0
    until: float | int = 0
    codes: list[str] = Field(default_factory=list)


class _File(StrictModel):
    rules: list[_Rule] = Field(max_length=16)


def load_rules(path: Path = SHIPPED) -> tuple[Rule, ...]:
    """Raises DataFileError naming file, line and field of everything that is wrong."""
    marked = read_marked(path, _File)
    rules: list[Rule] = []
    problems: list[Problem] = []
    for number, row in enumerate(marked.value.rules):
        where = ("rules", number, "when")
        if row.when in [rule.when for rule in rules]:
            problems.append(marked.problem(where, "twice"))
            continue
        try:
            rules.append(Rule(Reason(row.when), float(row.over), float(row.until), tuple(row.codes)))
        except ValueError as error:
            problems.append(marked.problem(where, str(error)))
    if problems:
        raise DataFileError(problems)
    return tuple(rules)
