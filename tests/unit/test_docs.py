"""What the documents promise: every test, file and command they name exists.

Law: reads files of the repository; starts nothing.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("docs/*.md"), ROOT / "README.md", ROOT / "CHANGELOG.md"])
TEST = re.compile(r"(tests/[\w/]+\.py)::(\w+)")
FILE = re.compile(
    r"`((?:regions|intentions|mesh|services|drills|terraform|tests|docs)/[\w./-]+\.(?:py|yaml|md|hcl|toml))`"
)


@cache
def _names(path: Path) -> frozenset[str]:
    """Names of the test functions of a file, methods of test classes included."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(n.name for n in ast.walk(tree) if isinstance(n, kinds) and n.name.startswith("test_"))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: d.name)
def test_every_test_that_is_named_exists(document: Path) -> None:
    named = TEST.findall(document.read_text(encoding="utf-8"))
    gone = [
        f"{file}::{name}"
        for file, name in named
        if not (ROOT / file).is_file() or name not in _names(ROOT / file)
    ]
    assert not gone


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: d.name)
def test_every_file_that_is_named_exists(document: Path) -> None:
    named = FILE.findall(document.read_text(encoding="utf-8"))
    assert not [file for file in named if not (ROOT / file).exists()]


def test_the_traps_list_names_a_test_for_most_lines_and_says_so_where_there_is_none() -> None:
    """A line of the list that neither names a test nor confesses is a line nobody looked at."""
    text = (ROOT / "docs" / "traps.md").read_text(encoding="utf-8")
    entries = re.split(r"\n(?=- \*\*|\d+\. \*\*|\| \d+ \|)", text.split("## 0.", 1)[1])[1:]
    assert len(entries) > 90
    silent = [e for e in entries if not TEST.search(e) and not re.search(r"[Nn]ot (applicable|covered)", e)]
    assert not silent


def test_all_thirty_faults_stand_in_the_table() -> None:
    text = (ROOT / "docs" / "traps.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| (\d+) \|", text, re.M) == [str(n) for n in range(1, 31)]
