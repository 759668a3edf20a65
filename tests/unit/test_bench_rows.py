"""Figures: a goal is met by arithmetic; a bench that fails is a row, not silence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from drills import bench
from drills.bench_rows import GoalError, Row, from_mapping, meets
from regions.cli.errors import UsageError


@pytest.mark.parametrize(
    ("goal", "value", "ratio", "met"),
    [
        ("<= 15", 15.0, None, True),
        ("<= 15", 15.1, None, False),
        (">= 99.95", 99.96, None, True),
        ("== 0", 0.0, None, True),
        ("ratio <= 2", 100.0, 1.9, True),
        ("ratio <= 2", 1.0, None, False),
        ("<= 1", None, None, False),
    ],
)
def test_goals(goal: str, value: float | None, ratio: float | None, met: bool) -> None:
    assert meets(goal, value, ratio) is met


def test_a_goal_that_says_nothing_is_an_error() -> None:
    with pytest.raises(GoalError, match="small"):
        meets("small", 1.0, None)


def test_met_is_computed_and_not_taken_from_the_bench() -> None:
    row = from_mapping(
        {"bench": "b", "metric": "m", "value": 9, "unit": "ms", "goal": "<= 5", "met": True, "ratio": 0}
    )
    assert row.met is False
    assert Row("b", "m", 4, "ms", peer="p", peer_value=2).ratio == 2
    assert Row("b", "m", 4, "ms").met is None


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_figure_that_is_none_is_null_in_json_and_meets_nothing(value: float) -> None:
    row = from_mapping(
        {"bench": "b", "metric": "m", "value": value, "unit": "s", "goal": ">= 0", "peer_value": value}
    )
    body = json.loads(json.dumps(row.as_json(), allow_nan=False))
    assert (body["value"], body["peer_value"], body["ratio"], body["met"]) == (None, None, None, False)


def test_a_bench_that_raises_leaves_an_error_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bench_bad.py").write_text("def run():\n    raise RuntimeError('no Envoy')\n")
    (tmp_path / "bench_empty.py").write_text("def run():\n    return []\n")
    bad, empty = bench.benches(tmp_path)
    assert bench.run(bad)[0].error == "RuntimeError: no Envoy"
    assert bench.run(bad)[0].met is False
    assert "no row" in bench.run(empty)[0].error
    assert "no Envoy" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("goal", "value", "ratio", "unit", "met"),
    [
        ("<= 15 ms", 15.0, None, "ms", True),
        ("<= 3 x", 100.0, 2.9, "s", True),
        ("<= 3 x", 1.0, 3.1, "s", False),
        ("<= 1.0 s and <= 1.5 x", 0.9, 1.4, "s", True),
        ("<= 1.0 s and <= 1.5 x", 0.9, 1.6, "s", False),
        ("<= 1.0 s and <= 1.5 x", 1.1, 1.4, "s", False),
        (">= 0", float("nan"), None, "", False),
    ],
)
def test_goals_with_units(goal: str, value: float, ratio: float | None, unit: str, met: bool) -> None:
    assert meets(goal, value, ratio, unit) is met


@pytest.mark.parametrize("goal", ["<= 1000 ms", "ratio <= 2 s", "<= 1.2.3", "<= 5 s or so", "<= 1 s and"])
def test_a_goal_in_another_unit_or_half_read_is_an_error(goal: str) -> None:
    with pytest.raises(GoalError, match="goal"):
        meets(goal, 900.0, 1.0, "s")


def test_one_row_without_sense_does_not_lose_its_neighbours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bench_two_rows.py").write_text(
        "from __future__ import annotations\n"
        "from dataclasses import asdict, dataclass\n"
        "@dataclass\n"
        "class R:\n    metric: str\n    value: float\n    unit: str\n    goal: str\n"
        "def run():\n"
        "    print('talk of a bench')\n"
        "    return [asdict(R('good', 1, 's', '<= 2 s')), asdict(R('bad', 1, 's', 'small')), {'value': 1}]\n"
    )
    (two,) = bench.benches(tmp_path)
    assert two.name == "two-rows"
    good, bad, bare = bench.run(two)
    assert (good.bench, good.met, good.error) == ("two-rows", True, "")
    assert (bad.metric, bad.met) == ("bad", False)
    assert "GoalError" in bad.error
    assert "TypeError" in bare.error
    heard = capsys.readouterr()
    assert heard.out == ""
    assert "talk of a bench" in heard.err


def test_the_command_prints_json_alone_on_stdout_and_fails_with_its_worst_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bench_bad.py").write_text("def run():\n    raise RuntimeError('no Envoy')\n")
    (tmp_path / "bench_good.py").write_text(
        "def run():\n    print('noise')\n    return [dict(metric='m', value=1, unit='s', goal='<= 2 s')]\n"
    )
    monkeypatch.setattr(bench, "folder", lambda: tmp_path)
    app = typer.Typer()
    app.callback()(lambda: None)
    bench.register(app)
    both = CliRunner().invoke(app, ["bench", "--json"])
    body = json.loads(both.stdout)
    assert both.exit_code == 1
    assert body["schema_version"] == 1
    assert [(row["bench"], row["met"]) for row in body["rows"]] == [("bad", False), ("good", True)]
    alone = CliRunner().invoke(app, ["bench", "good", "--json"])
    assert alone.exit_code == 0
    assert set(json.loads(alone.stdout)["rows"][0]) == {
        *("bench", "metric", "value", "unit", "peer", "peer_value", "ratio", "goal", "met")
    }
    assert CliRunner().invoke(app, ["bench", "--list"]).stdout.split() == ["bad", "good"]


def test_without_the_tests_of_a_checkout_the_way_out_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "__file__", str(tmp_path / "drills" / "bench.py"))
    with pytest.raises(UsageError, match="checkout"):
        bench.folder()
