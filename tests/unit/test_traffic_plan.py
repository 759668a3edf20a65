"""The plan: values in force, refusals, and what health and evacuation change."""

from hypothesis import given
from hypothesis import strategies as st

from mesh.consul import keys
from mesh.model import CANARY, FULL, STABLE
from mesh.traffic import plan as planning
from mesh.traffic.plan import ConfigPage, Value
from regions.model import Cloud, Region, RegionSet

NAMES = ("a", "b", "c")
REGIONS = RegionSet(
    tuple(
        Region(n, Cloud.LOCAL, (n + "1",), tuple(m for m in NAMES if m != n), 1.0, primary=n == "a")
        for n in NAMES
    )
)
ALL = {(r, s): 2 for r in NAMES for s in (STABLE, CANARY)}


def page(marker: bool = True, **values: str) -> ConfigPage:
    named = {
        "canary": keys.DEFAULT_CANARY,
        "own": keys.canary_weight("chat"),
        "regions": keys.region_shares("chat"),
    }
    named["evacuated"] = keys.evacuated("chat")
    return ConfigPage(
        {named[k]: Value(v.encode(), i + 5) for i, (k, v) in enumerate(values.items())}, marker, 9
    )


def make(config: ConfigPage, healthy=ALL, down=(), last=(), good=None):  # type: ignore[no-untyped-def]
    effective = planning.resolve("chat", config, good or {}, REGIONS)
    return planning.plan("chat", effective, healthy, frozenset(down), last)


def share(result, region=None, stage=None):  # type: ignore[no-untyped-def]
    return sum(s.weight for s in result.slices if region in (None, s.region) and stage in (None, s.stage))


def test_nothing_configured_means_the_weights_of_the_rows_and_no_canary() -> None:
    result = make(page())
    assert (share(result, stage=CANARY), share(result)) == (0, FULL)
    assert {r: share(result, r) for r in NAMES} == {"a": 3334, "b": 3333, "c": 3333}
    assert result.reason == "as configured"


def test_the_service_key_wins_over_the_default() -> None:
    result = make(page(canary="0.15", own="0.4"))
    assert share(result, stage=CANARY) == 4000
    assert result.canary_key == keys.canary_weight("chat")


def test_a_bad_value_leaves_the_last_good_one_and_says_so() -> None:
    result = make(page(canary="abc"), good={keys.DEFAULT_CANARY: b"0.15"})
    assert share(result, stage=CANARY) == 1500
    (refusal,) = result.refusals
    assert refusal.key == keys.DEFAULT_CANARY
    assert "not a number" in refusal.reason
    assert refusal.kv_index == 5


def test_a_bad_service_key_without_a_past_falls_to_the_default_key() -> None:
    result = make(page(canary="0.2", own="2"))
    assert share(result, stage=CANARY) == 2000
    assert len(result.refusals) == 1


def test_one_deleted_key_means_its_default_but_a_wiped_prefix_is_a_fault() -> None:
    good = {keys.DEFAULT_CANARY: b"0.15"}
    assert share(make(page(), good=good), stage=CANARY) == 0
    wiped = make(page(marker=False), good=good)
    assert share(wiped, stage=CANARY) == 1500
    assert "vanished" in wiped.refusals[0].reason


def test_an_empty_canary_goes_to_stable_of_the_same_region() -> None:
    healthy = {**ALL, ("b", CANARY): 0}
    result = make(page(canary="0.3"), healthy)
    assert share(result, "b") == 3333
    assert share(result, "b", CANARY) == 0
    assert "b/canary" in result.reason


def test_an_empty_stable_never_becomes_canary_of_its_own_region() -> None:
    healthy = {**ALL, ("b", STABLE): 0}
    result = make(page(canary="0.3"), healthy)
    assert share(result, "b", STABLE) == 0
    assert share(result, "b", CANARY) == share(make(page(canary="0.3")), "b", CANARY)


def test_evacuation_empties_the_region_keeps_the_canary_share_and_comes_home() -> None:
    before = make(page(canary="0.15"))
    during = make(page(canary="0.15", evacuated='["a"]'), last=before.layout)
    after = make(page(canary="0.15"), last=during.layout)
    assert share(during, "a") == 0
    assert share(during, stage=CANARY) == 1500
    assert during.layout == before.layout
    assert after.slices == before.slices


def test_an_unreachable_region_is_lent_to_the_others() -> None:
    result = make(page(), down=("c",))
    assert share(result, "c") == 0
    assert "unreachable" in result.reason


def test_all_broken_keeps_what_people_asked_for_and_says_so() -> None:
    result = make(page(canary="0.15"), healthy={})
    assert share(result) == FULL
    assert "no healthy stable instance" in result.reason
    assert share(make(page(evacuated='["a"]'), healthy={}), "a") == 0


@given(
    st.dictionaries(st.tuples(st.sampled_from(NAMES), st.sampled_from([STABLE, CANARY])), st.integers(0, 2)),
    st.sets(st.sampled_from(NAMES)),
    st.sets(st.sampled_from(NAMES), max_size=2),
    st.floats(0, 1),
    st.dictionaries(st.sampled_from(NAMES), st.integers(1, 9), min_size=1),
)
def test_every_input_gives_a_whole_plan(healthy, down, evacuated, canary, shares) -> None:  # type: ignore[no-untyped-def]
    import json

    config = page(canary=repr(canary), regions=json.dumps(shares), evacuated=json.dumps(sorted(evacuated)))
    result = make(config, healthy, down)
    result.check()
    assert result.reason
    alive = {o for o, n in healthy.items() if n and o[0] not in down | evacuated}
    if any(s == STABLE for _, s in alive):
        assert all((piece.region, piece.stage) in alive for piece in result.slices)
    assert not any(piece.region in evacuated for piece in result.slices)
