"""Wakes that fail, engines that die, devices that are busy or lost: started cold, moved, or kept out."""

from __future__ import annotations

from typing import Any

import pytest

from services.faults import DeviceLost, OutOfDeviceMemory, WakeFailed
from services.lifecycle import State
from tests.fakes.sleepy_engine import Orders
from tests.unit.pool_world import World, cards, lived, names, raises


@pytest.mark.parametrize(
    ("orders", "why"),
    [
        (Orders(on_wake=raises(WakeFailed("no memory"))), "no memory"),
        (Orders(on_wake=raises(OutOfDeviceMemory("out of memory"))), "out of memory"),
        (Orders(on_wake=raises(OSError("pipe"))), "pipe"),
        (Orders(wake_s=60.0), "TimeoutError"),
        (Orders(garbage=1), "the fixed prompt got"),
    ],
)
def test_a_failed_wake_is_quarantined_and_started_cold(orders: Orders, why: str) -> None:
    """vllm: garbage after waking answers 200 all the same; here the fixed prompt catches it."""

    async def test(it: World) -> None:
        before = await it.request()
        assert (await it.pool.sleep()).ok
        seen: list[tuple[str, State]] = []
        it.scribe.on_tell = lambda what: seen.append((what, it.state))
        woken = await it.pool.wake()
        assert (woken.ok, it.state) == (True, State.RUNNING)
        assert why in woken.recovered
        assert [what for what, _ in seen] == ["waking", "quarantined", "ready"], "no traffic in between"
        assert names(woken)[-4:] == ["close", "build and load", "fixed prompt", "tell Consul"]
        assert all(step.seconds >= 0 for step in woken.steps)
        assert await it.request() == before
        assert it.engine.renewals == 1

    world = lived(test, orders)
    assert world.orders.log[-2:] == ["close 0", "start 1"]
    assert world.orders.living == 1, "the broken engine was given back"


def test_what_fails_cold_too_stays_out_of_traffic_until_it_is_woken_again() -> None:
    async def test(it: World) -> None:
        await it.pool.sleep()
        woken = await it.pool.wake()
        assert (woken.code, it.state) == ("quarantined", State.QUARANTINED)
        assert "the fixed prompt got" in woken.error
        assert it.scribe.log[-1] == "quarantined"
        assert it.instance.why_not_ready() == "quarantined"
        it.orders.cold_garbage = 0
        assert ((await it.pool.wake()).ok, it.state) == (True, State.RUNNING)
        assert it.scribe.log[-1] == "ready"

    world = lived(test, Orders(garbage=1, cold_garbage=1))
    assert world.orders.living == 1


def test_an_engine_that_hangs_in_close_does_not_hold_up_the_cold_start() -> None:
    async def test(it: World) -> None:
        await it.pool.sleep()
        woken = await it.pool.wake()
        assert woken.ok
        assert 3.0 <= woken.seconds < 10.0

    lived(test, Orders(on_wake=raises(WakeFailed("x")), close_s=1000.0))


def test_over_85_percent_the_instance_is_rebuilt_on_the_least_loaded_device() -> None:
    async def test(it: World) -> None:
        assert it.devices is not None
        a, b, c = (d.uuid for d in it.devices.list())
        before = await it.request()
        await it.pool.sleep()
        it.devices.set_load(a, 0.9)
        it.devices.set_load(b, 0.5)
        it.devices.set_load(c, 0.1)
        woken = await it.pool.wake()
        assert woken.ok
        assert names(woken) == ["tell the mesh", "room", "close", "rebuild", "fixed prompt", "tell Consul"]
        assert "the least" in woken.steps[1].note
        assert (it.engine.binding.uuid, it.scribe.device) == (c, c)
        assert it.engine.binding.torch == "cuda:2"
        assert await it.request() == before

    world = lived(test, devices=cards(3))
    assert world.orders.log[-2:][0] == "close 0"
    assert world.orders.living == 1, "the one on the busy device was given back"


def test_all_devices_busy_it_wakes_at_home_and_says_so() -> None:
    async def test(it: World) -> None:
        assert it.devices is not None
        await it.pool.sleep()
        for device in it.devices.list():
            it.devices.set_load(device.uuid, 0.95)
        woken = await it.pool.wake()
        assert woken.ok
        assert "it stays" in woken.steps[1].note
        assert it.built == 1

    lived(test, devices=cards())


def test_no_room_anywhere_it_sleeps_on_untouched() -> None:
    async def test(it: World) -> None:
        assert it.devices is not None
        await it.pool.sleep()
        since = it.pool.slept_at
        for device in it.devices.list():
            it.devices.set_used(device.uuid, 9_500)
        woken = await it.pool.wake()
        assert (woken.code, it.state, it.pool.slept_at) == ("no_room", State.ASLEEP, since)
        assert it.scribe.log[-2:] == ["waking", "asleep"]
        assert it.scribe.slept_at == since, "its place in the LRU stays"
        it.devices.set_used(it.devices.list()[0].uuid, 0)
        assert (await it.pool.wake()).ok

    world = lived(test, devices=cards())
    assert world.orders.log == [f"start 0 {world.engine.binding.uuid}", "sleep 1", "wake"]


def test_a_device_lost_while_asleep_is_left() -> None:
    async def test(it: World) -> None:
        assert it.devices is not None
        a, b = (d.uuid for d in it.devices.list())
        await it.pool.sleep()
        it.devices.lose(a)
        woken = await it.pool.wake()
        assert (woken.ok, it.engine.binding.uuid) == (True, b)
        assert "is gone" in woken.steps[1].note

    lived(test, devices=cards())


def test_a_device_lost_in_the_wake_is_left() -> None:
    async def test(it: World) -> None:
        assert it.devices is not None
        a, b = (d.uuid for d in it.devices.list())

        def falls_off() -> None:
            assert it.devices is not None
            it.devices.lose(a)
            raise DeviceLost("GPU is lost")

        def refuses(where: Any) -> None:
            if where.uuid == a:
                raise DeviceLost("GPU is lost")

        it.orders.on_wake, it.orders.on_start = falls_off, refuses
        await it.pool.sleep()
        woken = await it.pool.wake()
        assert (woken.ok, it.engine.binding.uuid) == (True, b)
        assert "quarantined" in it.scribe.log

    world = lived(test, devices=cards())
    assert world.orders.living == 1


def test_the_last_device_lost_is_the_end() -> None:
    async def test(it: World) -> None:
        it.orders.on_wake = it.orders.on_start = raises(DeviceLost("GPU is lost"))
        await it.pool.sleep()
        woken = await it.pool.wake()
        assert (woken.code, it.state) == ("device_lost", State.DEAD)
        assert "GPU is lost" in it.instance.dead, "/health says so, Consul takes it out"

    lived(test, devices=cards(1))


def test_a_named_device_is_taken_and_an_unknown_one_refused() -> None:
    async def test(it: World) -> None:
        assert it.devices is not None
        other = it.devices.list()[1].uuid
        await it.pool.sleep()
        refused = await it.pool.wake("GPU-nowhere")
        assert (refused.code, it.state) == ("device", State.ASLEEP)
        assert other in refused.error, "says which there are"
        it.devices.set_load(other, 0.99)
        assert ((await it.pool.wake(other)).ok, it.engine.binding.uuid) == (True, other)

    lived(test, devices=cards())


def test_an_engine_that_died_in_traffic_comes_back_by_waking_it() -> None:
    async def test(it: World) -> None:
        it.instance.failed("illegal memory access")
        assert it.state is State.DEAD
        woken = await it.pool.wake()
        assert (woken.ok, woken.recovered, it.state) == (True, "it was dead", State.RUNNING)
        assert await it.request()

    lived(test)


def test_a_bug_of_ours_ends_in_quarantine_and_not_in_between() -> None:
    async def test(it: World) -> None:
        await it.pool.sleep()
        it.scribe.on_tell = lambda what: {"quarantined": 1}[what]
        woken = await it.pool.wake()
        assert (woken.code, it.state) == ("bug", State.QUARANTINED)
        it.scribe.on_tell = lambda _: None
        assert ((await it.pool.wake()).ok, it.state) == (True, State.RUNNING)

    lived(test)


def test_a_cold_one_too_starts_where_there_is_room_and_not_too_much_to_do() -> None:
    async def test(it: World) -> None:
        assert it.devices is not None
        a, b = (d.uuid for d in it.devices.list())
        await it.pool.sleep(0)
        it.devices.set_used(a, 9_900)
        it.devices.set_used(b, 9_900)
        assert ((await it.pool.wake()).code, it.state) == ("no_room", State.COLD)
        it.devices.set_used(b, 0)
        assert ((await it.pool.wake()).ok, it.engine.binding.uuid) == (True, b)
        await it.pool.sleep()
        await it.pool.cool()
        it.devices.set_load(b, 0.9)
        it.devices.set_used(a, 0)
        assert ((await it.pool.wake()).ok, it.engine.binding.uuid) == (True, a)

    lived(test, devices=cards())
