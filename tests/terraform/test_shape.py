"""The shape of terraform/, read as data: nothing is started.

Law: a new region is a new row and a copied folder, so all roots must be alike.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hcl2
import pytest
import yaml

from tests.terraform.house import MODULES, ROOTS, TERRAFORM, TOP

FILES = {"main.tf", "outputs.tf", "variables.tf", "versions.tf"}
FOLDERS = [*ROOTS, *MODULES]
ROWS = sorted((TOP / "regions").glob("*.yaml"))


def _ids(path: Path) -> str:
    return str(path.relative_to(TERRAFORM))


def _blocks(folder: Path, kind: str) -> list[tuple[str, dict[str, Any]]]:
    """(name, body) of every block of a kind, in the order of the files."""
    found = []
    for path in sorted(folder.glob("*.tf")):
        with path.open() as text:
            for block in hcl2.load(text).get(kind, []):
                found += [(name.strip('"'), body) for name, body in block.items() if name != "__is_block__"]
    return found


def test_there_are_roots_modules_and_rows() -> None:
    # Every test below is a loop over these; an empty list would pass them all.
    assert len(ROOTS) >= 3
    assert MODULES
    assert len(ROWS) >= 3


def test_every_region_has_a_root_and_every_root_a_row() -> None:
    rows = {yaml.safe_load(row.read_text())["name"] for row in ROWS}
    assert {root.name for root in ROOTS} == rows


@pytest.mark.parametrize("root", ROOTS[1:], ids=_ids)
def test_roots_are_alike(root: Path) -> None:
    for name in FILES:
        assert (root / name).read_text() == (ROOTS[0] / name).read_text(), f"{name} differs from {ROOTS[0]}"


@pytest.mark.parametrize("folder", FOLDERS, ids=_ids)
def test_files_are_where_one_looks_for_them(folder: Path) -> None:
    assert {p.name for p in folder.glob("*.tf")} >= FILES
    assert len(_blocks(folder, "variable")) == len(_named(folder / "variables.tf", "variable"))
    assert len(_blocks(folder, "output")) == len(_named(folder / "outputs.tf", "output"))


def _named(path: Path, kind: str) -> list[str]:
    with path.open() as text:
        blocks = hcl2.load(text).get(kind, [])
    return [name.strip('"') for block in blocks for name in block if name != "__is_block__"]


@pytest.mark.parametrize("folder", FOLDERS, ids=_ids)
@pytest.mark.parametrize("kind", ["variable", "output"])
def test_variables_and_outputs_are_sorted_typed_and_described(folder: Path, kind: str) -> None:
    blocks = _blocks(folder, kind)
    names = [name for name, _ in blocks]
    assert names
    assert names == sorted(names)
    for name, body in blocks:
        assert len(body.get("description", "")) > 15, f"{name} is not described"
        if kind == "variable":
            assert body.get("type"), f"{name} has no type"


@pytest.mark.parametrize("folder", FOLDERS, ids=_ids)
def test_a_terraform_version_is_asked_for_and_no_provider(folder: Path) -> None:
    settings = []
    for path in folder.glob("*.tf"):
        with path.open() as text:
            parsed = hcl2.load(text)
        settings += parsed.get("terraform", [])
        assert "provider" not in parsed, f"{path} needs a provider download"
    assert [s["required_version"].strip('"') for s in settings] == [">= 1.6"]
    assert all("required_providers" not in s for s in settings)


@pytest.mark.parametrize("root", ROOTS, ids=_ids)
def test_roots_and_their_module_speak_of_the_same_outputs(root: Path) -> None:
    module = dict(_blocks(TERRAFORM / "modules" / "local-region", "output"))
    assert {n: b["description"] for n, b in _blocks(root, "output")} == {
        n: b["description"] for n, b in module.items()
    }
