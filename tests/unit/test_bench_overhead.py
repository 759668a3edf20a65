"""The arithmetic of the overhead bench, without a world."""

from __future__ import annotations

from math import isnan

import pytest

from drills.bench_rows import from_mapping
from drills.load import Sample
from tests.bench.bench_overhead import DIRECT, INGRESS, PLAIN, TURNS, quantile, rows


def sample(ms: float, *, ok: bool = True) -> Sample:
    return Sample(0, "u", 100.0, 100.0, 100.0, 100.0 + ms / 1000, 200 if ok else 503, ok)


@pytest.mark.parametrize(("share", "want"), [(0.5, 2.0), (0.99, 4.0), (0.0, 1.0), (0.25, 1.0), (0.26, 2.0)])
def test_quantile(share: float, want: float) -> None:
    assert quantile([1.0, 2.0, 3.0, 4.0], share) == want
    assert isnan(quantile([], share))


def test_added_is_the_difference_of_the_medians_and_failures_have_their_own_row() -> None:
    found = {
        DIRECT: [sample(1), sample(2), sample(30)],
        INGRESS: [sample(3), sample(3.4), sample(50), sample(0.1, ok=False)],
        PLAIN: [sample(2.5)],
    }
    added, plain, p50, p99, failed = map(from_mapping, rows(found))
    assert [added.value, plain.value] == pytest.approx([1.4, 0.5])
    assert added.met is True
    assert plain.met is None
    assert [p50.value, p50.peer_value] == pytest.approx([3.4, 2])
    assert [p99.value, p99.peer_value] == pytest.approx([50, 30])
    assert (failed.value, failed.met) == (1, False)


def test_nothing_answered_meets_no_goal() -> None:
    added, *_ = map(from_mapping, rows({DIRECT: [], INGRESS: [], PLAIN: []}))
    assert (added.value, added.met) == (None, False)


def test_turns_are_balanced_and_in_balanced_places() -> None:
    places = {way: [i for i, turn in enumerate(TURNS) if turn == way] for way in TURNS}
    assert set(places) == {DIRECT, INGRESS, PLAIN}
    assert len({len(of_way) for of_way in places.values()}) == 1
    # A machine that gets slower all the time favours nobody.
    assert len({sum(of_way) for of_way in places.values()}) == 1
