"""Sleep, wake and cool of one instance in virtual time: the order, what keeps it awake, what is written."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from services.faults import EngineFault
from services.lifecycle import State
from services.pool import metrics
from services.pool.memory import load
from services.pool.snapshot import SnapshotRefused, foreign
from tests.fakes.loop_clock import LoopClock
from tests.fakes.sleepy_engine import MEMORY, Orders
from tests.unit.pool_world import World, cards, lived, names, raises


def test_asleep_after_consul_was_told_and_before_the_mesh_hears_of_the_wake() -> None:
    async def test(it: World) -> None:
        before = await it.request()
        slept = await it.pool.sleep()
        assert (slept.code, it.state) == ("", State.ASLEEP)
        assert names(slept) == [
            "tell the mesh", "drain", "fixed prompt", "describe the model", "engine sleeps",
            "memory given back", "snapshot", "tell Consul",
        ]  # fmt: skip
        assert it.scribe.log == ["draining", "asleep"]
        assert it.scribe.slept_at == it.pool.slept_at >= 1_700_000_000
        assert it.engine.stats().memory_bytes == 0
        with pytest.raises(RuntimeError, match="sleeps"):
            await it.request()
        woken = await it.pool.wake()
        assert (woken.code, it.state, it.pool.slept_at) == ("", State.RUNNING, 0)
        assert names(woken) == ["tell the mesh", "room", "engine wakes", "fixed prompt", "tell Consul"]
        assert it.scribe.log[2:] == ["waking", "ready"]
        assert await it.request() == before
        assert slept.seconds >= 0.5, "the settle time of the mesh is part of it"

    world = lived(test)
    assert world.orders.log == ["start 0", "sleep 1", "wake"]


def test_an_engine_whose_wake_proves_itself_is_not_asked_again() -> None:
    """Its answer costs a pass over all weights: on a processor that is most of a wake."""

    async def test(it: World) -> None:
        assert (await it.pool.sleep()).ok
        woken = await it.pool.wake()
        assert (woken.code, it.state) == ("", State.RUNNING)
        assert names(woken) == ["tell the mesh", "room", "engine wakes", "tell Consul"]

    lived(test, Orders(proves=True))


def test_the_engine_sleeps_only_after_what_ran_has_ended() -> None:
    async def test(it: World) -> None:
        running = asyncio.ensure_future(it.request(2000))
        await asyncio.sleep(0.1)
        told: list[bool] = []
        it.scribe.on_tell = lambda what: told.append(running.done())
        slept = await it.pool.sleep()
        assert slept.ok
        assert running.done()
        assert len(await running) > 2000
        assert told[0] is False, "Consul heard of it while the request ran"

    lived(test, Orders(token_cost_ms=1))


def test_what_does_not_end_in_time_keeps_it_awake() -> None:
    async def test(it: World) -> None:
        running = asyncio.ensure_future(it.request(100_000))
        await asyncio.sleep(0.1)
        slept = await it.pool.sleep()
        assert (slept.code, it.state) == ("still_running", State.RUNNING)
        assert "1 requests" in slept.error
        assert it.scribe.log == ["draining", "ready"]
        assert not running.done()
        running.cancel()
        await asyncio.wait((running,))

    world = lived(test)
    assert "sleep 1" not in world.orders.log


def test_a_latecomer_is_served_before_it_sleeps() -> None:
    async def test(it: World) -> None:
        late: list[asyncio.Future[str]] = []
        real = it.engine.inner.sleep

        async def sleep(level: int = 1) -> None:
            if not late:
                late.append(asyncio.ensure_future(it.request(50)))
                await asyncio.sleep(0.005)
            await real(level)

        it.engine.inner.sleep = sleep  # type: ignore[method-assign]
        slept = await it.pool.sleep()
        assert (slept.ok, it.state) == (True, State.ASLEEP)
        assert len((await late[0]).split()) == 50
        assert "waited for a latecomer" in [s.note for s in slept.steps]

    lived(test)


def test_without_consul_it_does_not_sleep() -> None:
    async def test(it: World) -> None:
        it.scribe.deaf = True
        assert (await it.pool.sleep()).code == "consul"
        assert it.state is State.RUNNING
        assert await it.request()

    lived(test)


def test_without_consul_it_wakes_all_the_same() -> None:
    async def test(it: World) -> None:
        await it.pool.sleep()
        it.scribe.deaf = True
        woken = await it.pool.wake()
        assert (woken.ok, it.state) == (True, State.RUNNING)
        assert "Consul doesn't answer" in woken.steps[-1].note

    lived(test)


@pytest.mark.parametrize("verbs", [("wake",), ("sleep", "sleep"), ("sleep", "wake", "wake"), ("cool",)])
def test_a_verb_out_of_place_is_refused_and_changes_nothing(verbs: tuple[str, ...]) -> None:
    async def test(it: World) -> None:
        *first, last = verbs
        for verb in first:
            assert (await getattr(it.pool, verb)()).ok
        state, told = it.state, list(it.scribe.log)
        assert (await getattr(it.pool, last)()).code == "wrong_state"
        assert (it.state, it.scribe.log) == (state, told)

    lived(test)


def test_an_unknown_level_is_refused_before_anything_happens() -> None:
    async def test(it: World) -> None:
        assert (await it.pool.sleep(3)).code == "level"
        assert (it.state, it.scribe.log) == (State.RUNNING, [])

    lived(test)


def test_one_verb_at_a_time_and_a_caller_that_leaves_does_not_stop_it() -> None:
    async def test(it: World) -> None:
        caller = asyncio.ensure_future(it.pool.sleep())
        await asyncio.sleep(0.1)
        assert (await it.pool.wake()).code == "busy"
        caller.cancel()
        await asyncio.wait((caller,))
        assert it.state is State.DRAINING
        await asyncio.sleep(2)
        assert it.state is State.ASLEEP
        assert it.pool.last is not None
        assert it.pool.last.ok

    lived(test)


@pytest.mark.parametrize("keeps", [MEMORY, MEMORY // 2])
def test_a_sleep_that_gives_too_little_back_is_no_success(keeps: int) -> None:
    """vllm#45520: sleep answers 200 while failing; vllm#32714: 6 GB instead of 20."""

    async def test(it: World) -> None:
        slept = await it.pool.sleep()
        assert (slept.code, it.state) == ("sleep_failed", State.COLD)
        assert "given back" in slept.error
        assert (it.engine.stats().memory_bytes, it.orders.living) == (0, 0)
        assert it.scribe.log == ["draining", "cold"]
        woken = await it.pool.wake()
        assert (woken.ok, it.state, it.built) == (True, State.RUNNING, 2)
        assert woken.recovered == "it was cold"

    lived(test, Orders(keeps=keeps))


def test_an_engine_that_refuses_to_sleep_but_answers_serves_on() -> None:
    async def test(it: World) -> None:
        slept = await it.pool.sleep()
        assert (slept.code, it.state) == ("engine", State.RUNNING)
        assert "serves on" in slept.error
        assert it.scribe.log == ["draining", "ready"]
        assert await it.request()

    lived(test, Orders(on_sleep=raises(EngineFault("cuMemUnmap failed"))))


def test_an_engine_that_a_failed_sleep_broke_is_started_anew() -> None:
    async def test(it: World) -> None:
        def breaks() -> None:
            it.engine.inner._dead = True  # type: ignore[attr-defined]
            raise EngineFault("illegal access")

        it.orders.on_sleep = breaks
        slept = await it.pool.sleep()
        assert (slept.code, it.state) == ("sleep_failed", State.RUNNING)
        assert it.scribe.log == ["draining", "quarantined", "ready"]
        assert await it.request()

    world = lived(test)
    assert world.orders.living == 1


def test_cold_means_closed_and_wakes_by_a_cold_start() -> None:
    async def test(it: World) -> None:
        before = await it.request()
        await it.pool.sleep()
        cooled = await it.pool.cool()
        assert (cooled.ok, it.state, it.orders.living) == (True, State.COLD, 0)
        assert (it.scribe.log[-1], it.scribe.slept_at) == ("cold", 0)
        assert ((await it.pool.wake()).ok, it.state) == (True, State.RUNNING)
        assert await it.request() == before

    lived(test)


def test_a_process_that_ends_is_not_woken_and_its_sleep_is_broken_off() -> None:
    async def test(it: World) -> None:
        sleeping = asyncio.ensure_future(it.pool.sleep())
        await asyncio.sleep(0.1)
        it.instance.lifecycle.leave()
        assert (await sleeping).code == "wrong_state"
        assert (await it.pool.wake()).code == "wrong_state"
        assert "ready" not in it.scribe.log

    lived(test)


def test_the_snapshot_is_on_disk_and_holds_no_secret(tmp_path: Path) -> None:
    file = tmp_path / "run" / "chat-stable-0.snapshot"

    async def test(it: World) -> None:
        with pytest.raises(SnapshotRefused, match="No such file"):
            load(file)
        await it.pool.sleep(2)
        found = load(file)
        assert (found.level, found.held, found.asleep, found.device) == (2, MEMORY, 0, "")
        assert found.answer == it.pool.memory.answer
        assert found.recipe.options == {"dtype": "fp32", "api_key_env": "KEY"}
        assert b"hush" not in it.pool.memory.raw
        assert foreign(found, found.identity, found.facts) == ""
        assert file.read_bytes() == it.pool.memory.raw
        assert file.stat().st_mode & 0o077 == 0
        assert [p.name for p in file.parent.iterdir()] == [file.name], "no temporary file stays"

    lived(test, file=file)


def test_a_snapshot_that_can_not_be_written_keeps_nobody_awake(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    async def test(it: World) -> None:
        slept = await it.pool.sleep()
        assert (slept.ok, it.state) == (True, State.ASLEEP)
        assert "not written" in slept.steps[-2].note

    lived(test, file=tmp_path / "file" / "s.snapshot")


def test_a_restarted_instance_compares_with_what_its_last_run_left(tmp_path: Path) -> None:
    file = tmp_path / "s.snapshot"
    notes: list[str] = []

    async def test(it: World) -> None:
        slept = await it.pool.sleep()
        assert slept.ok
        notes.append(slept.steps[2].note)

    lived(test, file=file)
    lived(test, file=file)
    raw = file.read_bytes()
    file.write_bytes(raw[:-1])
    lived(test, file=file)
    file.write_bytes(raw.replace(b" 2 ", b" 1 ", 1))
    lived(test, file=file)
    lived(test, Orders(token_shift=1), file=file)
    first, same, cut, version, other = notes
    assert (first, same) == ("", "as in the last run")
    assert "cut off" in cut
    assert "version 1" in version
    assert "the fixed prompt got" in other


def test_a_jump_of_the_clock_changes_no_duration_and_no_state() -> None:
    async def test(it: World) -> None:
        clock = it.pool.parts.clock
        assert isinstance(clock, LoopClock)
        sleeping = asyncio.ensure_future(it.pool.sleep())
        await asyncio.sleep(0.2)
        clock.epoch_s -= 86_400
        slept = await sleeping
        assert slept.ok
        assert 0.5 <= slept.seconds < 2.0
        clock.epoch_s += 10 * 86_400
        woken = await it.pool.wake()
        assert (woken.ok, woken.seconds < 2.0) == (True, True)

    lived(test)


def test_the_pools_figures() -> None:
    async def test(it: World) -> None:
        registry = it.instance.registry
        metrics.watch(it.pool, registry)

        def value(name: str, **labels: str) -> float | None:
            return registry.get_sample_value(f"weir_pool_{name}", labels)

        await it.pool.sleep()
        await it.pool.sleep()
        await it.pool.cool()
        await it.pool.wake()
        assert value("verbs_total", verb="sleep", code="done") == 1.0
        assert value("verbs_total", verb="sleep", code="wrong_state") == 1.0
        assert value("verbs_total", verb="wake", code="done") == 1.0
        assert value("verb_seconds_count", verb="wake") == 1.0
        assert value("cold_starts_total") == 1.0

    lived(test)


@pytest.mark.parametrize("kept", [0, 50, 500])
def test_the_drivers_count_beats_the_engines_own(kept: int) -> None:
    """An allocator that caches says "free" and holds on: the device is still full for everybody else."""

    async def test(it: World) -> None:
        assert it.devices is not None
        home, pid = it.engine.binding.uuid, os.getpid()
        it.devices.take(home, MEMORY + 30, pid)
        it.orders.on_sleep = lambda: it.devices and it.devices.take(home, kept - MEMORY, pid)
        slept = await it.pool.sleep()
        if kept < 200:
            assert (slept.ok, it.state) == (True, State.ASLEEP)
            assert "on the device" in slept.steps[5].note
            return
        assert (slept.code, it.state) == ("sleep_failed", State.COLD)
        assert "the driver says" in slept.error

    lived(test, devices=cards())


def test_level_0_closes_the_engine_after_the_drain() -> None:
    async def test(it: World) -> None:
        before = await it.request()
        closed = await it.pool.sleep(0)
        assert (closed.ok, it.state, it.orders.living) == (True, State.COLD, 0)
        assert it.scribe.log == ["draining", "cold"]
        assert names(closed)[:2] == ["tell the mesh", "drain"]
        assert ((await it.pool.wake()).ok, await it.request()) == (True, before)

    lived(test)
