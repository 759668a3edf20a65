"""What the local-region module promises, with real Terraform and a stand-in for weir.

Law: proves the module, not weir: test_local_region_real.py does both.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.terraform import stand_in
from tests.terraform.conftest import Stand
from tests.terraform.house import ROOTS, TERRAFORM, House

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("terraform")]

NAME = "us-east-1"


def test_files_are_formatted(tmp_path: Path) -> None:
    house = House.copy(tmp_path / "house")
    everything = str(house.folder / "terraform")
    assert house.done(NAME, "fmt", "-check", "-recursive", "-diff", everything) == ""


def test_every_root_is_valid(tmp_path: Path) -> None:
    house = House.copy(tmp_path / "house")
    for root in ROOTS:
        house.init(root.name)
        assert "Success!" in house.done(root.name, "validate", "-no-color")
        assert not list(house.root(root.name).glob(".terraform/providers/*")), "a provider was downloaded"


def test_apply_is_followed_by_no_change_and_destroy_takes_it_away(stand: Stand) -> None:
    house = stand.house
    house.init(NAME)
    house.apply(NAME)
    assert stand.raw_calls() == [
        {
            "argv": ["region", "up", NAME, "--world", str(house.folder / ".weir")],
            "cwd": str(house.folder),
        }
    ]
    folder = house.folder / ".weir" / "regions" / NAME
    assert house.outputs(NAME) == {
        "ca_file": f"{folder}/ca.pem",
        "consul": "http://127.20.1.1:8500",
        "ingress": "https://127.20.1.3:8443",
        "name": NAME,
    }
    code, said = house.plan(NAME)
    assert (code, "No changes." in said) == (0, True), said
    house.apply(NAME)
    assert stand.calls() == [("up", NAME)], "a second apply must not start the region again"
    house.destroy(NAME)
    assert stand.calls() == [("up", NAME), ("down", NAME)]
    assert not (folder / "region.json").exists()


def test_a_region_that_died_behind_terraforms_back_is_seen_and_brought_back(stand: Stand) -> None:
    house = stand.house
    house.init(NAME)
    house.apply(NAME)
    stand_in.kill(stand.pid(NAME))
    code, said = house.plan(NAME)
    assert (code, "must be replaced" in said) == (2, True), said
    house.apply(NAME)
    assert stand.calls() == [("up", NAME), ("down", NAME), ("up", NAME)]
    assert house.plan(NAME)[0] == 0


def test_a_process_id_given_to_somebody_else_does_not_count_as_the_region(stand: Stand) -> None:
    house = stand.house
    house.init(NAME)
    house.apply(NAME)
    stand_in.kill(stand.pid(NAME))
    # Process 1 lives, and is not our region.
    (house.folder / ".weir/regions" / NAME / "supervisor.lock").write_text("1\n")
    try:
        assert house.plan(NAME)[0] == 2
    finally:
        (house.folder / ".weir/regions" / NAME / "supervisor.lock").unlink()


def test_a_region_that_does_not_come_up_fails_the_apply_and_the_next_one_tries_again(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = stand.house
    house.init(NAME)
    monkeypatch.setenv("WEIR_STAND_IN_FAILS", "1")
    failed = house.run(NAME, "apply", "-auto-approve", "-no-color")
    assert failed.returncode == 1
    assert "port 8500 is taken" in failed.stdout
    monkeypatch.delenv("WEIR_STAND_IN_FAILS")
    house.apply(NAME)
    assert house.plan(NAME)[0] == 0


def test_another_weir_command_is_taken_without_a_restart(stand: Stand, tmp_path: Path) -> None:
    house = stand.house
    house.init(NAME)
    house.apply(NAME)
    moved = str(shutil.copy(house.variables["weir_command"], tmp_path / "moved"))
    house.apply(NAME, weir_command=moved)
    assert stand.calls() == [("up", NAME)]


def test_regions_keep_states_of_their_own_and_share_a_world(stand: Stand) -> None:
    names = [root.name for root in ROOTS]
    for name in names:
        stand.house.init(name)
        stand.house.apply(name)
    assert [c["argv"][-1] for c in stand.raw_calls()] == [str(stand.house.folder / ".weir")] * len(names)
    stand.house.destroy(names[0])
    assert [stand.house.plan(name)[0] for name in names] == [2, 0, 0]


@pytest.mark.parametrize(
    ("variables", "why"),
    [
        ({"kind": "aws"}, "aws and azure come with a later release"),
        ({"kind": "azure"}, "aws and azure come with a later release"),
        ({"kind": "gcp"}, "kind: must be local"),
        ({"weir_command": "/nowhere/weir"}, "Run `make setup`"),
        ({"weir_command": "./weir"}, "must be an absolute path or a name on PATH"),
    ],
)
def test_what_is_refused_says_why(stand: Stand, variables: dict[str, str], why: str) -> None:
    stand.house.init(NAME)
    code, said = stand.house.plan(NAME, **variables)
    assert code == 1
    assert why in said.replace("│ ", ""), said


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("name", "eu-west-9", "name is eu-west-9, but the file and this folder are called us-east-1"),
        ("failover", "[atlantis]", "failover names a region that has no row"),
        ("failover", "[us-east-1]", "can't take over from itself"),
        ("zones", "[]", "must name at least one zone"),
        ("cloud", "gcp", "must be aws, azure or local"),
        ("weight", "-1", "must be 0 or more"),
    ],
)
def test_a_row_that_contradicts_itself_stops_the_plan(stand: Stand, field: str, value: str, why: str) -> None:
    row = stand.house.folder / "regions" / f"{NAME}.yaml"
    row.write_text(_with(row.read_text(), field, value))
    stand.house.init(NAME)
    code, said = stand.house.plan(NAME)
    assert code == 1
    assert why in said.replace("│ ", ""), said
    assert stand.calls() == []


def _with(text: str, field: str, value: str) -> str:
    """The row with one top-level field replaced."""
    lines, dropping = [], False
    for line in text.splitlines():
        if line and not line.startswith((" ", "-", "#")):
            dropping = line.split(":")[0] == field
        if not dropping:
            lines.append(line)
    return "\n".join([*lines, f"{field}: {value}", ""])


def test_a_new_region_is_a_row_and_a_copied_folder(stand: Stand) -> None:
    house = stand.house
    row = (house.folder / "regions" / f"{NAME}.yaml").read_text()
    (house.folder / "regions" / "eu-north-1.yaml").write_text(_with(row, "name", "eu-north-1"))
    shutil.copytree(
        TERRAFORM / "regions" / NAME, house.root("eu-north-1"), ignore=shutil.ignore_patterns(".terraform*")
    )
    house.init("eu-north-1")
    house.apply("eu-north-1")
    assert house.outputs("eu-north-1")["name"] == "eu-north-1"
    house.destroy("eu-north-1")
