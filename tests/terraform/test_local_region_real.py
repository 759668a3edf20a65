"""The whole of it: real Terraform, real weir, one real region that comes and goes.

Law: the world is this test's own and is taken down whatever happens.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.terraform.house import House

NAME = "us-east-1"
WEIR = Path(sys.executable).parent / "weir"


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.usefixtures("terraform")
def test_a_real_region_comes_stays_and_goes(tmp_path: Path) -> None:
    house = House.copy(tmp_path / "house", weir_command=str(WEIR))
    world = house.folder / ".weir"
    house.init(NAME)
    try:
        house.apply(NAME)
        told = house.outputs(NAME)
        assert told["name"] == NAME
        assert Path(told["ca_file"]).read_text().startswith("-----BEGIN CERTIFICATE-----")
        assert told["ingress"].startswith("https://127.")
        assert _datacenter(told["consul"]) == NAME
        code, said = house.plan(NAME)
        assert (code, "No changes." in said) == (0, True), said
        house.destroy(NAME)
        with pytest.raises(OSError, match="refused"):
            _datacenter(told["consul"])
        assert house.plan(NAME)[0] == 2
    finally:
        subprocess.run(
            [str(WEIR), "down", "--world", str(world)],
            cwd=house.folder,
            env=os.environ | {"NO_COLOR": "1"},
            timeout=60,
            check=False,
            capture_output=True,
        )


def _datacenter(consul: str) -> str:
    with urllib.request.urlopen(f"{consul}/v1/agent/self", timeout=10) as answer:
        return str(json.load(answer)["Config"]["Datacenter"])
