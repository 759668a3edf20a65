"""The whole of it: real Terraform, real weir, real regions that come and go.

Law: the world is this test's own and is taken down whatever happens.
"""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.terraform.house import House

PRIMARY, OTHER = "cn-north-1", "us-east-1"
WEIR = Path(sys.executable).parent / "weir"

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("terraform"),
]


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    made = House.copy(tmp_path / "house", weir_command=str(WEIR))
    for name in (PRIMARY, OTHER):
        made.init(name)
    try:
        yield made
    finally:
        down = subprocess.run(
            [str(WEIR), "down", "--dir", str(made.folder / ".weir")],
            cwd=made.folder,
            text=True,
            timeout=120,
            check=False,
            capture_output=True,
        )
        assert down.returncode == 0, down.stderr


def test_real_regions_come_stay_and_go(house: House) -> None:
    too_early = house.run(OTHER, "apply", "-auto-approve", "-no-color")
    assert too_early.returncode == 1
    assert f"apply {PRIMARY} first" in too_early.stdout

    told = {}
    for name in (PRIMARY, OTHER):
        house.apply(name)
        told[name] = house.outputs(name)
        assert told[name]["name"] == name
        assert Path(told[name]["ca_file"]).read_text().startswith("-----BEGIN CERTIFICATE-----")
        assert told[name]["ingress"].startswith("https://127.")
        assert _ask(told[name]["consul"], "agent/self")["Config"]["Datacenter"] == name
    assert set(_ask(told[OTHER]["consul"], "catalog/datacenters")) == {PRIMARY, OTHER}
    assert "chat" in _ask(told[OTHER]["consul"], "catalog/services")
    for name in (PRIMARY, OTHER):
        code, said = house.plan(name)
        assert (code, "No changes." in said) == (0, True), said

    house.destroy(OTHER)
    with pytest.raises(OSError, match="refused"):
        _ask(told[OTHER]["consul"], "agent/self")
    assert house.plan(PRIMARY)[0] == 0, "taking one region away must not touch the other"

    # Gone behind Terraform's back: seen, brought back.
    subprocess.run(
        [str(WEIR), "region", "down", PRIMARY, "--world", str(house.folder / ".weir")],
        timeout=120,
        check=True,
        capture_output=True,
    )
    assert house.plan(PRIMARY)[0] == 2
    house.apply(PRIMARY)
    assert house.plan(PRIMARY)[0] == 0
    house.destroy(PRIMARY)
    with pytest.raises(OSError, match="refused"):
        _ask(told[PRIMARY]["consul"], "agent/self")


def _ask(consul: str, path: str) -> dict[str, dict[str, str]]:
    with urllib.request.urlopen(f"{consul}/v1/{path}", timeout=10) as answer:
        body = json.load(answer)
    return body if isinstance(body, dict) else {key: {} for key in body}
