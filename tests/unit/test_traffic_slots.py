"""The hash space moves only what has to move."""

from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.model import CANARY, FULL, STABLE
from mesh.traffic import slots

REGIONS = ("a", "b", "c")
shares = st.dictionaries(st.sampled_from(REGIONS), st.integers(0, 100), min_size=1).filter(
    lambda d: sum(d.values()) > 0
)
canary = st.floats(0, 1)


def distance(one: dict[slots.Owner, int], two: dict[slots.Owner, int]) -> int:
    return sum(max(0, weight - two.get(owner, 0)) for owner, weight in one.items())


@given(shares, canary)
def test_targets_add_up(weights: dict[str, int], share: float) -> None:
    want = slots.targets(weights, share)
    assert sum(want.values()) == FULL
    assert sum(w for (_, stage), w in want.items() if stage == CANARY) == round(share * FULL)


@given(st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 5000), min_size=1), st.data())
def test_a_larger_whole_takes_from_nobody(weights: dict[str, int], data: st.DataObject) -> None:
    whole = sum(weights.values())
    total = data.draw(st.integers(0, whole - 1))
    less, more = slots.spread(weights, total), slots.spread(weights, total + 1)
    assert (sum(less.values()), sum(more.values())) == (total, total + 1)
    assert all(less[name] <= more[name] <= weights[name] for name in weights)
    assert all(abs(less[name] - total * weight / whole) < len(weights) for name, weight in weights.items())


def test_no_region_loses_canary_while_the_canary_grows() -> None:
    """By largest remainders region b had 468 basis points at 97.18 % and 467 at 97.19 %."""
    weights = {"a": 60, "b": 5, "c": 39}
    canaries = [slots.targets(weights, share / FULL).get(("b", CANARY), 0) for share in range(9700, 9740)]
    assert canaries == sorted(canaries)


@given(st.lists(st.tuples(shares, canary), min_size=1, max_size=12))
@settings(max_examples=200)
def test_a_change_moves_exactly_the_least_possible(steps: list[tuple[dict[str, int], float]]) -> None:
    layout: slots.Layout = ()
    for weights, share in steps:
        want = slots.targets(weights, share)
        after = slots.relayout(layout, want)
        assert slots.owned(after) == want
        if layout:
            assert slots.moved(layout, after) == distance(slots.owned(layout), want)
        layout = after


@given(shares, st.lists(canary, min_size=2, max_size=6))
def test_a_growing_canary_loses_no_session_and_crosses_no_region(
    weights: dict[str, int], steps: list[float]
) -> None:
    layout: slots.Layout = ()
    place = lambda lay, i: slots._owner_at(lay, i)  # noqa: E731
    for share in sorted(steps):
        after = slots.relayout(layout, slots.targets(weights, share))
        if layout:
            for i in range(0, FULL, 37):
                was, now = place(layout, i), place(after, i)
                assert was is not None
                assert now is not None
                assert was[0] == now[0]
                assert not (was[1] == CANARY and now[1] == STABLE)
        layout = after


def test_three_regions_move_no_more_than_the_share_that_has_to() -> None:
    """Cumulative intervals would move 20 % here, twice what is needed (issue: at most 1.2 x)."""
    before = slots.relayout((), slots.targets({"a": 50, "b": 30, "c": 20}, 0.15))
    after = slots.relayout(before, slots.targets({"a": 40, "b": 30, "c": 30}, 0.15))
    assert slots.moved(before, after) == 1000


def test_the_layout_does_not_crumble_over_a_thousand_changes() -> None:
    import random

    rng = random.Random(7)
    layout: slots.Layout = ()
    longest = 0
    for _ in range(1000):
        weights = {r: rng.randint(0, 100) for r in REGIONS}
        if not sum(weights.values()):
            continue
        layout = slots.relayout(layout, slots.targets(weights, rng.random()))
        longest = max(longest, len(layout))
    assert longest <= slots.MAX_RUNS


def test_garbage_for_a_past_gives_the_canonical_layout() -> None:
    want = slots.targets({"a": 1, "b": 1}, 0.1)
    assert slots.relayout(((("a", STABLE), 17),), want) == slots.canonical(want)
