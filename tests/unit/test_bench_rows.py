"""Figures: a goal is met by arithmetic; a bench that fails is a row, not silence."""

from __future__ import annotations

from pathlib import Path

import pytest

from drills import bench
from drills.bench_rows import GoalError, Row, from_mapping, meets


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


def test_a_bench_that_raises_leaves_an_error_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bench_bad.py").write_text("def run():\n    raise RuntimeError('no Envoy')\n")
    (tmp_path / "bench_empty.py").write_text("def run():\n    return []\n")
    bad, empty = bench.benches(tmp_path)
    assert bench.run(bad)[0].error == "RuntimeError: no Envoy"
    assert bench.run(bad)[0].met is False
    assert "no row" in bench.run(empty)[0].error
    assert "no Envoy" in capsys.readouterr().err
