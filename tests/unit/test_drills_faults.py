"""Faults: what they touch, that healing is idempotent and unconditional, that proof measures."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from drills.faults.base import Fault, FaultSpec, Proof
from drills.faults.network import chain_name, rules
from drills.faults.table import TABLE, build
from regions.cli.errors import Refused, UsageError
from tests.fakes.drill_world import FakeWorld
from tests.virtual import run

TARGET = "cn-north-1"
DRILL = "20261101T101500Z-drill-ab12cd"


def fault(world: FakeWorld, do: str, params: Mapping[str, str | float] | None = None) -> Fault:
    return build(FaultSpec(do, TARGET, "chat", DRILL, params or {}), world.doors())


def cycle(world: FakeWorld, do: str) -> tuple[Proof, Proof]:
    """prepare, inject, proof (not healed), heal twice, proof."""

    async def steps() -> tuple[Proof, Proof]:
        found = fault(world, do)
        spec = await found.prepare()
        await found.inject()
        broken = await found.proof()
        # Healed by another process that knows the spec alone, as after a crash.
        again = build(spec, world.doors())
        await again.heal()
        await again.heal()
        return broken, await again.proof()

    return run(steps())


@pytest.mark.parametrize("do", [name for name in TABLE if not name.startswith("freeze-")])
def test_every_fault_shows_itself_and_is_gone_after_healing(do: str) -> None:
    world = FakeWorld()
    broken, healed = cycle(world, do)
    assert not broken.healed, broken.detail
    assert healed.healed, healed.detail
    assert world.rules == []
    assert world.evacuated == set()
    assert world.keys == {"config/traffic/canary-weight": b"0.1"}


@pytest.mark.parametrize("do", list(TABLE))
def test_healing_without_an_injection_harms_nothing(do: str) -> None:
    world = FakeWorld()

    async def steps() -> Proof:
        found = fault(world, do)
        await found.prepare()
        await found.heal()
        return await found.proof()

    assert run(steps()).healed
    assert world.regions[TARGET].ups == 0


def test_a_frozen_region_is_told_by_its_frozen_processes() -> None:
    broken, healed = cycle(FakeWorld(), "freeze-region")
    assert broken.detail == "processes [100, 101, 102] are still frozen"
    assert healed.healed


def test_a_frozen_process_is_let_run_only_while_it_is_the_regions_own() -> None:
    """After a crash the pid may belong to somebody else: it must get no signal."""
    world = FakeWorld()

    async def steps() -> None:
        found = fault(world, "freeze-executor", {"process": "chat-stable-0", "pid": 4711.0})
        await found.heal()

    run(steps())
    assert world.calls == []


def test_a_process_that_has_not_stopped_yet_is_let_run_all_the_same() -> None:
    """It stops when it gets a processor to stop on: that may be after its healing."""
    world = FakeWorld()

    async def steps() -> None:
        await fault(world, "freeze-executor", {"process": "chat-stable-0", "pid": 100.0}).heal()

    run(steps())
    assert world.calls == ["signal SIGCONT"]


def test_the_cut_drops_both_ways_and_leaves_clients_alone() -> None:
    made = rules("127.20.1.0/24", ("127.20.2.0/24", "127.20.3.0/24"))
    wide = [r for r in made if r[1].endswith("/24")]
    assert wide == [
        ("-s", "127.20.1.0/24", "-d", "127.20.2.0/24", "-j", "DROP"),
        ("-s", "127.20.2.0/24", "-d", "127.20.1.0/24", "-j", "DROP"),
        ("-s", "127.20.1.0/24", "-d", "127.20.3.0/24", "-j", "DROP"),
        ("-s", "127.20.3.0/24", "-d", "127.20.1.0/24", "-j", "DROP"),
    ]
    narrow = [r for r in made if r not in wide]
    # Clients and the drill itself come from 127.0.0.1 too: only gateways' and Consul's own ports are closed.
    assert {r[r.index("--dport") + 1] for r in narrow} == {"8443", "8300", "8302"}
    assert not [r for r in narrow if r[3].endswith(".3") or "8500" in r]


def test_the_chain_name_fits_and_is_the_drills_own() -> None:
    assert chain_name(DRILL) == "WEIR-ab12cd"
    assert len(chain_name("x-" + "y" * 200)) <= 28


def test_what_somebody_else_changed_meanwhile_stays() -> None:
    world = FakeWorld()

    async def steps() -> str:
        found = fault(world, "change-canary")
        await found.prepare()
        await found.inject()
        world.keys["config/traffic/canary-weight"] = b"0.4"
        return await found.heal()

    assert "stays as it is" in run(steps())
    assert world.keys["config/traffic/canary-weight"] == b"0.4"


def test_a_key_that_was_absent_is_absent_again() -> None:
    world = FakeWorld()
    world.keys.clear()

    async def steps() -> None:
        found = fault(world, "change-canary")
        await found.prepare()
        await found.inject()
        assert world.keys == {"config/traffic/canary-weight": b"0.0500"}
        await found.heal()

    run(steps())
    assert world.keys == {}


@pytest.mark.parametrize(("do", "told"), [("kill-region", "none of its processes"), ("evacuate", "already")])
def test_what_cannot_be_broken_is_refused_before(do: str, told: str) -> None:
    world = FakeWorld()
    world.evacuated.add(TARGET)
    if do == "kill-region":
        world.regions[TARGET].alive = False
    with pytest.raises(Refused) as refused:
        run(fault(world, do).prepare())
    assert told in refused.value.why


def test_unknown_names_are_told() -> None:
    with pytest.raises(UsageError, match="kill-region"):
        fault(FakeWorld(), "nuke")
    with pytest.raises(Refused, match="known are"):
        run(fault(FakeWorld(), "hold-executor", {"process": "nobody"}).prepare())
