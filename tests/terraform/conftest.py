"""Fixtures of the Terraform tests: a copy of the house, with a stand-in for weir.

Law: processes that a test's regions started die with the test.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mesh import tools
from tests.terraform import stand_in
from tests.terraform.house import House


@pytest.fixture(scope="session")
def terraform() -> Path:
    """Terraform's path; without it (it is in no Debian release) these tests are skipped, and say why."""
    found = tools.look(tools.TOOLS["terraform"], os.environ)
    if found is None:
        pytest.skip("terraform is not there: put Terraform 1.6 or newer (or OpenTofu) on PATH")
    return found


@dataclass(frozen=True)
class Stand:
    """A house whose weir is the stand-in."""

    house: House
    log: Path

    def calls(self) -> list[tuple[str, str]]:
        """(verb, region) of every call so far."""
        return [(c["argv"][1], c["argv"][2]) for c in self.raw_calls()]

    def raw_calls(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []

    def pid(self, region: str) -> int:
        return int((self.house.folder / ".weir" / "regions" / region / "supervisor.lock").read_text())


@pytest.fixture
def stand(terraform: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stand]:
    # Spaces and quotes on purpose: the module starts weir without a shell.
    folder = tmp_path / "a house's folder"
    command = tmp_path / "weir stand-in"
    command.write_text(f"#!{sys.executable}\n" + Path(stand_in.__file__).read_text())
    command.chmod(0o755)
    log = tmp_path / "calls"
    monkeypatch.setenv("WEIR_STAND_IN_CALLS", str(log))
    try:
        yield Stand(House.copy(folder, weir_command=str(command)), log)
    finally:
        for lock in folder.glob(".weir/regions/*/supervisor.lock"):
            stand_in.kill(int(lock.read_text()))
