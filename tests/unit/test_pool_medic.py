"""Who is broken is healed without anybody's doing, with and without Consul; its watchers fail and go on."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from itertools import pairwise

import pytest

from services.faults import EngineFault
from services.lifecycle import State
from services.main import watched
from services.pool.medic import Medic
from services.pool.parts import PoolSettings
from services.pool.watch import LONGEST_S, Watcher
from tests.fakes.loop_clock import LoopClock
from tests.unit.pool_world import World, lived, raises

FIRST_S = PoolSettings().heal_first_s


async def nursed(it: World, seconds: float) -> None:
    """What an executor without Consul does by itself, for so long."""
    async with AsyncExitStack() as stack:
        watched(it.pool, None, it.pool.parts.clock, stack)
        await asyncio.sleep(seconds)
    await asyncio.sleep(0)


def test_a_watcher_that_fails_says_so_and_goes_on_ever_more_seldom(caplog: pytest.LogCaptureFixture) -> None:
    times: list[float] = []

    async def look() -> None:
        times.append(asyncio.get_running_loop().time())
        if len(times) != 20:
            raise KeyError("a bug")

    async def test(_: World) -> None:
        work = asyncio.ensure_future(Watcher("medic", look, 0.5).run(LoopClock()))
        await asyncio.sleep(20 * LONGEST_S)
        work.cancel()
        await asyncio.wait((work,))

    lived(test)
    pauses = [round(b - a, 3) for a, b in pairwise(times)]
    assert pauses[:3] == [1.0, 2.0, 4.0]
    assert (max(pauses), pauses[19]) == (LONGEST_S, 0.5), "one good round and all is well again"
    failed = [r for r in caplog.records if "the medic's round failed" in r.getMessage()]
    assert len(failed) == len(times) - 1
    assert failed[0].exc_info, "with its traceback"


def test_a_verb_under_way_is_no_failed_try_of_the_medic() -> None:
    async def test(it: World) -> None:
        medic = Medic(it.pool, it.pool.parts.clock)
        it.orders.on_start = raises(EngineFault("no memory"))
        it.orders.close_s = 2.0
        it.instance.failed("died")
        assert not await medic.tick()
        await asyncio.sleep(FIRST_S)
        waking = asyncio.ensure_future(it.pool.wake())
        await asyncio.sleep(0)
        assert not await medic.tick(), "busy"
        assert not (await waking).ok
        it.orders.on_start = lambda _: None
        assert not await medic.tick(), "it waits anew"
        await asyncio.sleep(FIRST_S)
        assert await medic.tick(), "and no longer than the first time"
        assert it.state is State.RUNNING

    lived(test)


def test_an_engine_that_died_is_started_anew_once_everybody_has_noticed() -> None:
    async def test(it: World) -> None:
        it.engine.inner._dead = True  # type: ignore[attr-defined]
        await nursed(it, FIRST_S)
        assert it.state is State.DEAD, "also where no request has found out"
        await nursed(it, FIRST_S + 1)
        assert (it.state, it.scribe.log[-1]) == (State.RUNNING, "ready")
        assert await it.request()

    assert lived(test).orders.living == 1


def test_what_can_not_be_healed_is_tried_ever_more_seldom() -> None:
    async def test(it: World) -> None:
        it.orders.on_start = raises(EngineFault("still no memory"))
        it.instance.failed("out of memory")
        await nursed(it, 3600)
        assert it.state is State.QUARANTINED
        starts = [x for x in it.orders.log[1:] if x.startswith("start")]
        tries = len(starts) // 2  # two cold starts a try
        assert 10 <= tries <= 18
        it.orders.on_start = lambda _: None
        await nursed(it, 301)
        assert it.state is State.RUNNING

    lived(test)


def test_one_that_sleeps_or_leaves_is_left_alone() -> None:
    async def test(it: World) -> None:
        await it.pool.sleep()
        await nursed(it, 1000)
        assert it.state is State.ASLEEP
        it.instance.failed("gone")
        it.instance.lifecycle.leave()
        await nursed(it, 1000)
        assert (it.state, it.built) == (State.DEAD, 1)

    lived(test)
