"""The arithmetic of the tracing bench, without an executor."""

from __future__ import annotations

from random import Random

import pytest

from drills.bench_rows import from_mapping
from tests.bench.bench_tracing import TURN, Used, interval, rows
from tests.bench.tracing_server import ALL, CONTROL, OFF, SOME

ADDED = {OFF: 0.0, CONTROL: 0.0, ALL: 0.08, SOME: 0.01}


def test_what_slows_a_whole_round_changes_no_ratio() -> None:
    """Rounds that took up to four times as long as others, as on a busy machine."""
    chance = Random(1)
    base = [chance.uniform(1, 4) * 1e-4 * TURN for _ in range(20)]
    rounds = [{mode: Used([cpu * (1 + more)], [cpu]) for mode, more in ADDED.items()} for cpu in base]
    found = {row.metric: row for row in map(from_mapping, rows(rounds))}
    for mode, more in ADDED.items():
        if mode != OFF:
            said = found[f"CPU added per request, {mode}, median of 20 rounds"]
            assert said.value == pytest.approx(100 * more)
            assert found[f"… {mode}, between the rounds' quartiles"].value == pytest.approx(0, abs=1e-9)
            assert said.met is (None if mode == CONTROL else True)


def test_the_interval_holds_the_median_and_narrows_with_more_rounds() -> None:
    chance = Random(2)
    few, many = ([chance.gauss(5, 2) for _ in range(count)] for count in (10, 300))
    (low, high), (closer, nearer) = interval(few), interval(many)
    assert low <= sorted(few)[5] <= high
    assert 4 < closer < nearer < 6
    assert nearer - closer < high - low
