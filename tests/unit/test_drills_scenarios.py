"""Scenario files: the shipped ones promise what the project promises; wrong lines are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from drills import scenario_file
from drills.faults.table import TABLE
from drills.model import Expect, Scenario
from regions.cli.errors import UsageError
from regions.yamlfile import DataFileError

GOOD = """\
title: t
description: d
steady_state:
  - probe: regions-ready
actions:
  - do: kill-region
expect:
  failed: 0
healing: h
"""


def decided(name: str, **settings: str) -> Scenario:
    return scenario_file.decide(scenario_file.read(name), settings, region="cn-north-1")


def test_the_four_drills_ship() -> None:
    names = ("consul-loss", "control-plane-loss", "region-evacuation", "region-loss")
    assert scenario_file.names() == names
    for name in names:
        for action in decided(name).actions:
            assert action.do in TABLE


@pytest.mark.parametrize(("mode", "recovery"), [("kill", 2), ("freeze", 5), ("cut-off", 5)])
def test_a_lost_region_keeps_the_projects_promise(mode: str, recovery: float) -> None:
    drill = decided("region-loss", mode=mode)
    assert drill.load.rate == 200
    assert drill.limit(Expect.SUCCESS_RATE) == 0.9995
    assert drill.limit(Expect.RECOVERY_S) == recovery
    assert drill.mode == mode


@pytest.mark.parametrize("name", ["region-evacuation", "control-plane-loss", "consul-loss"])
def test_planned_and_control_faults_may_lose_nothing(name: str) -> None:
    assert decided(name).limit(Expect.FAILED) == 0


def test_limits_of_the_planned_drills() -> None:
    assert decided("region-evacuation").limit(Expect.NO_NEW_REQUESTS_AFTER_S) == 1
    assert decided("control-plane-loss").limit(Expect.NEXT_WEIGHT_CHANGE_S) == 2
    assert decided("consul-loss").limit(Expect.NEXT_WEIGHT_CHANGE_S) == 2


def test_parameters_are_set_from_outside() -> None:
    drill = decided("region-loss", rate="50.5", duration="7", streams="0", tokens="9", mode="freeze")
    assert (drill.load.rate, drill.phases.hold_s, drill.load.streams, drill.load.tokens) == (50.5, 7, 0, 9)
    assert drill.actions[0].do == "freeze-region"


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"rate": "abc"}, "a plain number is needed"),
        ({"rate": "nan"}, "a plain number is needed"),
        ({"rate": "0"}, "greater than 0"),
        ({"streams": "1.5"}, "less than or equal to 1"),
        ({"tokens": "1.5"}, "integer"),
        ({"mode": "explode"}, "not a mode of region-loss"),
        ({"colour": "red"}, "no such parameter"),
    ],
)
def test_wrong_parameters_are_refused_by_name(settings: dict[str, str], told: str) -> None:
    with pytest.raises(UsageError) as error:
        decided("region-loss", **settings)
    assert f"--set {next(iter(settings))}" in error.value.what
    assert told in error.value.why


def write(folder: Path, text: str) -> str:
    path = folder / "mine.yaml"
    path.write_text(text)
    return str(path)


def test_a_file_of_ones_own_runs_by_its_path(tmp_path: Path) -> None:
    drill = scenario_file.decide(scenario_file.read(write(tmp_path, GOOD)), {}, region="a")
    assert drill.name == "mine"
    assert drill.text == GOOD


@pytest.mark.parametrize(
    ("old", "new", "line", "told"),
    [
        ("probe: regions-ready", "probe: vibes", 4, "unknown probe"),
        ("probe: regions-ready", "probe: success-rate\n    tolerance: {}", 5, "bounds nothing"),
        ("  failed: 0", "  luck: 1", 8, "unknown field"),
        ("  failed: 0", "  failed: {kill: 1}", 8, "one number for each mode"),
        ("  - do: kill-region", "  - do: kill-region\n    at_s: 99", 7, "would never happen"),
        ("title: t", "title: 3", 1, "must be text"),
        ("healing: h", "healing: h\nload: {rate: 1, rate_up_to: 2}", 10, "a second time"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, old: str, new: str, line: int, told: str) -> None:
    with pytest.raises(DataFileError) as error:
        scenario_file.read(write(tmp_path, GOOD.replace(old, new)))
    (problem,) = error.value.problems
    assert problem.line == line
    assert told in problem.reason


def test_a_drill_must_break_something_and_expect_something(tmp_path: Path) -> None:
    text = GOOD.replace("actions:\n  - do: kill-region\n", "").replace(
        "expect:\n  failed: 0\n", "expect: {}\n"
    )
    with pytest.raises(DataFileError) as error:
        scenario_file.read(write(tmp_path, text))
    reasons = " ".join(p.reason for p in error.value.problems)
    assert "breaks nothing" in reasons
    assert "can't fail" in reasons


def test_an_unknown_drill_names_the_known_ones() -> None:
    with pytest.raises(UsageError, match="region-loss"):
        scenario_file.read("region-los")
