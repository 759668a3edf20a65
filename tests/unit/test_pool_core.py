"""The pool's pure parts: who goes cold, where a sleeper wakes, who may sleep, the snapshot's bytes."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.devices.door import Device
from services.pool.lru import MOST_ASLEEP, Sleeper, to_cool
from services.pool.observe import Held, contradiction
from services.pool.place import BUSY, NoRoom, choose, fits, reachable
from services.pool.plan import Member, find, members, share, sleepers, why_keep
from services.pool.verify import Answer, garbage, kept_back

SLEEPERS = st.lists(
    st.builds(Sleeper, st.uuids().map(str), st.sampled_from(["cpu", "GPU-0", "GPU-1"]), st.integers(0, 50)),
    max_size=60,
    unique_by=lambda s: s.instance,
)


@given(SLEEPERS, st.integers(0, 10), st.randoms(use_true_random=False))
def test_the_pool_keeps_the_latest_of_each_device(rows: list[Sleeper], keep: int, rng: Random) -> None:
    cooled = set(to_cool(rows, keep))
    for device in {s.device for s in rows}:
        here = [s for s in rows if s.device == device]
        left = [s for s in here if s.instance not in cooled]
        assert len(left) == min(keep, len(here)), "never more than fit, never fewer than could stay"
        gone = [s.slept_at for s in here if s.instance in cooled]
        assert not gone or not left or max(gone) <= min(s.slept_at for s in left)
    shuffled = rows[:]
    rng.shuffle(shuffled)
    assert to_cool(shuffled, keep) == to_cool(rows, keep), "all who look agree"


def test_the_ninth_sleeper_sends_the_one_that_slept_longest() -> None:
    rows = [Sleeper(f"i{n}", "GPU-0", 100 + n) for n in range(MOST_ASLEEP)]
    assert to_cool(rows) == ()
    assert to_cool([*rows, Sleeper("new", "GPU-0", 500)]) == ("i0",)
    assert to_cool([*rows, Sleeper("other card", "GPU-1", 500)]) == ()
    assert to_cool([*rows, Sleeper("same name, other host", "GPU-0", 500, "b")]) == ()


GIB = 2**30


def card(n: int, load: float | None, used: int = 0) -> Device:
    return Device(n, f"GPU-{n}", "x", 80 * GIB, used, load)


CARDS = st.lists(
    st.tuples(st.floats(0, 1), st.integers(0, 80 * GIB)), min_size=0, max_size=8
).map(lambda rows: [card(n, load, used) for n, (load, used) in enumerate(rows)])  # fmt: skip


@given(CARDS, st.integers(0, 9), st.integers(0, 90 * GIB))
def test_a_sleeper_wakes_where_there_is_room_and_moves_only_for_a_reason(
    cards: list[Device], own: int, need: int
) -> None:
    home = next((c for c in cards if c.index == own), None)
    try:
        choice = choose(f"GPU-{own}", cards, need)
    except NoRoom:
        assert not any(fits(c, need) for c in cards)
        return
    target = next(c for c in cards if c.uuid == choice.device)
    assert fits(target, need)
    assert choice.reason
    assert choice.moved == (target is not home)
    if home is not None and home.load <= BUSY and fits(home, need):
        assert not choice.moved
    free = [c for c in cards if c is not home and c.load <= BUSY and fits(c, need)]
    if choice.moved and free:
        assert target.load == min(c.load for c in free), "the least loaded"
    if choice.moved and not free:
        assert home is None or not fits(home, need)


def test_all_are_busy_it_stays_and_says_so() -> None:
    choice = choose("GPU-0", [card(0, 0.9), card(1, 0.86)], GIB)
    assert (choice.device, choice.moved) == ("GPU-0", False)
    assert "90%" in choice.reason
    assert "no other device" in choice.reason


def test_just_at_the_threshold_is_not_over_it() -> None:
    assert not choose("GPU-0", [card(0, 0.85), card(1, 0.0)], GIB).moved
    assert choose("GPU-0", [card(0, 0.86), card(1, 0.0)], GIB).device == "GPU-1"


def test_a_lost_device_is_left_even_for_a_busy_one() -> None:
    choice = choose("GPU-7", [card(0, 0.99), card(1, 0.95)], GIB)
    assert (choice.device, choice.moved) == ("GPU-1", True)
    with pytest.raises(NoRoom, match="GPU-7 is gone"):
        choose("GPU-7", [], GIB)


@pytest.mark.parametrize(
    ("own", "slices", "seen"),
    [
        ("GPU-0", False, ["GPU-0", "GPU-1"]),
        ("MIG-a", False, ["MIG-a"]),
        ("MIG-a", True, ["GPU-0", "GPU-1", "MIG-a", "MIG-b"]),
    ],
)
def test_a_process_that_holds_a_slice_stays_on_it(own: str, slices: bool, seen: list[str]) -> None:
    every = [replace(card(0, 0.1), uuid=u) for u in ("GPU-0", "GPU-1", "MIG-a", "MIG-b")]
    assert [d.uuid for d in reachable(own, every, slices=slices)] == seen


def row(id_: str, lifecycle: str = "ready", stage: str = "stable", **meta: str) -> dict[str, Any]:
    meta |= {"lifecycle": lifecycle, "stage": stage}
    service = {"ID": id_, "Service": "chat", "Meta": meta}
    return {"Service": service, "Checks": [{"Status": "passing"}]}


def test_the_pool_is_read_from_consul_alone() -> None:
    asleep = row("b", "asleep", device="GPU-1", admin="127.0.0.1:9001", slept_at="1700000000")
    dead = row("a")
    dead["Checks"].append({"Status": "critical"})
    broken = row("c", slept_at="yesterday")
    found, problems = members([asleep, dead, broken, {"Service": None}], "us")
    assert [m.instance for m in found] == ["a", "b"]
    assert found[1] == Member("us", "b", "stable", "asleep", "passing", "GPU-1", "127.0.0.1:9001", 1700000000)
    assert (found[0].shown, found[0].takes_traffic) == ("unreachable", False)
    assert len(problems) == 2
    assert members(None, "us") == ((), ())


def test_two_services_share_the_eight_of_a_device_and_sidecars_are_no_instances() -> None:
    def it(service: str, at: int) -> dict[str, Any]:
        meta = {"lifecycle": "asleep", "device": "GPU-1", "host": "h", "slept_at": str(at)}
        return {"Service": service, "Meta": meta, "Kind": "connect-proxy" if "proxy" in service else ""}

    names = [f"{service}{end}" for service in ("chat", "embed") for end in ("", "-sidecar-proxy")]
    rows = {f"{name}-{n}": it(name, 10 * n + len(name)) for n in range(MOST_ASLEEP) for name in names}
    cooled = to_cool(sleepers(rows))
    assert cooled == tuple(f"{s}-{n}" for n in range(4) for s in ("chat", "embed"))


def test_sleepers_of_a_host_make_sense_or_are_left_out() -> None:
    meta = {"lifecycle": "asleep", "slept_at": "7", "device": "cpu", "host": "h"}
    services = {
        "a": {"Service": "chat", "Meta": meta},
        "a-sidecar-proxy": {"Service": "chat-sidecar-proxy", "Meta": meta | {"weir_kind": "sidecar"}},
        "b": {"Service": "chat", "Meta": meta | {"lifecycle": "cold"}},
        "c": {"Service": "chat", "Meta": meta | {"slept_at": "?"}},
        "d": {"Service": "chat"},
    }
    assert sleepers(services) == (Sleeper("a", "cpu", 7, "h"),)


STABLE = Member("us", "s0", "stable", "ready")


@pytest.mark.parametrize(
    ("pool", "traffic", "refused"),
    [
        ((STABLE,), 0.9, True),
        ((STABLE,), None, True),
        ((STABLE,), 0.0, False),
        ((STABLE, replace(STABLE, instance="s1")), 0.9, False),
        ((STABLE, replace(STABLE, instance="s1", lifecycle="asleep")), 0.9, True),
        ((STABLE, replace(STABLE, instance="s1", health="critical")), 0.9, True),
        ((STABLE, replace(STABLE, instance="s1", region="eu")), 0.9, True),
        ((STABLE, replace(STABLE, instance="s1", stage="canary")), 0.9, True),
    ],
)
def test_the_last_ready_one_with_traffic_stays(
    pool: tuple[Member, ...], traffic: float | None, refused: bool
) -> None:
    assert bool(why_keep(STABLE, pool, traffic)) == refused
    assert not why_keep(replace(STABLE, lifecycle="draining"), pool, traffic), "one that is out already may"


def test_share_of_a_stage_in_a_status_document() -> None:
    document = {"slices": [["us", "stable", 8500], ["us", "canary", 1500], ["eu", "stable", 0]]}
    assert share(document, "us", "canary") == 0.15
    assert share(document, "eu", "stable") == 0.0
    for broken in (None, {}, {"slices": 3}, {"slices": [["us", "stable"]]}, {"slices": [["us", "x", "y"]]}):
        assert share(broken, "us", "stable") is None


def test_an_id_that_stands_in_two_regions() -> None:
    pool = (STABLE, replace(STABLE, region="eu"))
    assert len(find(pool, "s0")) == 2
    assert find(pool, "s0", "eu") == (pool[1],)


def test_garbage_is_seen_by_ids_and_by_text_where_there_are_no_ids() -> None:
    assert garbage(Answer((1, 2), "a b"), Answer((1, 2), "a b")) == ""
    assert "[1, 3]" in garbage(Answer((1, 2), "a b"), Answer((1, 3), "a b"))
    assert garbage(Answer((-1, -1), "a b"), Answer((-1,), "a b")) == "", "text cut into other pieces"
    assert garbage(Answer((-1,), "a b"), Answer((-1,), "a c"))
    assert garbage(Answer((1, 2), "a b"), Answer((), ""))
    second = garbage(Answer((1,), "a", "torch"), Answer((1,), "a", "layerwise"))
    assert "answered by 'layerwise'" in second, "a fallback must not hide a broken engine"


def test_memory_that_was_kept_back_is_told() -> None:
    assert kept_back(1000, 100) == ""
    assert "only 0 of" in kept_back(20 * GIB, 20 * GIB)
    assert "30%" in kept_back(20 * GIB, 14 * GIB), "vllm#32714: 6 GB instead of 20"
    assert kept_back(0, 0) == "", "an engine that holds none"


@pytest.mark.parametrize(
    ("claimed", "before", "after", "wrong"),
    [
        (1000, 1030, 30, ""),
        (1000, 1030, None, ""),
        (1000, 1030, 900, "holds"),
        (0, 20 * GIB, 14 * GIB, "were given back"),
        (0, 20 * GIB, 3 * GIB, ""),
        (1000, None, None, ""),
    ],
)
def test_the_driver_contradicts(claimed: int, before: int | None, after: int | None, wrong: str) -> None:
    said = contradiction(claimed, Held(1, before), Held(1, after), 0.8)
    assert wrong in said
    assert bool(said) == bool(wrong)
