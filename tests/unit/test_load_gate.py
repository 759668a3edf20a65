"""The gate before new connections: bounded, fair, and nobody is forgotten in it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drills.load_gate import Gate, Pass
from tests.virtual import run


@dataclass
class Crowd:
    """Requests at a gate, in all three places they can be in."""

    gate: Gate
    waiting: list[asyncio.Task[Pass]] = field(default_factory=list)
    inside: list[Pass] = field(default_factory=list)
    entered: int = 0

    async def settle(self) -> None:
        for _ in range(4):
            await asyncio.sleep(0)
        for task in [t for t in self.waiting if t.done()]:
            self.waiting.remove(task)
            if not task.cancelled():
                self.inside.append(task.result())
                self.entered += 1

    async def come(self, count: int = 1) -> None:
        self.waiting += [asyncio.create_task(self.gate.enter()) for _ in range(count)]
        await self.settle()

    async def end(self) -> None:
        for task in self.waiting:
            task.cancel()
        await asyncio.gather(*self.waiting, return_exceptions=True)


def test_only_so_many_open_at_once_and_a_finished_handshake_lets_the_next_begin() -> None:
    async def story() -> None:
        crowd = Crowd(Gate(2))
        await crowd.come(5)
        assert (len(crowd.inside), len(crowd.waiting)) == (2, 3)
        crowd.inside[0].connected()
        await crowd.settle()
        assert len(crowd.waiting) == 2
        crowd.inside[0].connected()  # a second time says nothing new
        await crowd.settle()
        assert len(crowd.waiting) == 2
        await crowd.end()

    run(story())


def test_a_connection_that_comes_free_serves_the_longest_waiting() -> None:
    async def story() -> None:
        crowd = Crowd(Gate(1))
        await crowd.come()
        first = asyncio.create_task(crowd.gate.enter(), name="first")
        await asyncio.sleep(0)
        second = asyncio.create_task(crowd.gate.enter(), name="second")
        await asyncio.sleep(0)
        crowd.inside[0].connected()
        await crowd.settle()
        assert first.done()
        assert not second.done()
        crowd.inside[0].leave(reusable=True)
        await crowd.settle()
        assert second.done()

    run(story())


@pytest.mark.parametrize("reusable", [True, False])
def test_a_connection_that_failed_leaves_none_but_its_place(reusable: bool) -> None:
    async def story() -> None:
        crowd = Crowd(Gate(1))
        await crowd.come(2)
        crowd.inside.pop().leave(reusable=reusable)
        await crowd.settle()
        (second,) = crowd.inside
        # Had the failed one left an idle connection, a third would get in beside the second.
        await crowd.come()
        assert len(crowd.waiting) == 1
        second.connected()
        await crowd.settle()
        assert not crowd.waiting

    run(story())


def test_who_gives_up_at_the_moment_of_his_turn_hands_it_on() -> None:
    async def story() -> None:
        crowd = Crowd(Gate(1))
        await crowd.come()
        leaving, staying = (asyncio.create_task(crowd.gate.enter()) for _ in range(2))
        await asyncio.sleep(0)
        crowd.inside[0].leave(reusable=False)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        await crowd.settle()
        assert leaving.cancelled()
        assert staying.done()

    run(story())


STEPS = st.lists(
    st.tuples(st.sampled_from(["come", "connect", "leave", "drop", "cancel"]), st.integers(0, 30)),
    max_size=60,
)


@given(opening=st.integers(1, 4), steps=STEPS)
def test_nobody_waits_while_there_is_room_and_the_bound_holds(
    opening: int, steps: list[tuple[str, int]]
) -> None:
    async def story() -> None:
        crowd = Crowd(Gate(opening))
        for what, pick in steps:
            if what == "come":
                await crowd.come()
            elif what == "cancel" and crowd.waiting:
                crowd.waiting[pick % len(crowd.waiting)].cancel()
            elif what == "connect" and crowd.inside:
                crowd.inside[pick % len(crowd.inside)].connected()
            elif crowd.inside and what in ("leave", "drop"):
                crowd.inside.pop(pick % len(crowd.inside)).leave(reusable=what == "leave")
            await crowd.settle()
            now_opening = sum(p._opening for p in crowd.inside)
            assert now_opening <= opening
            assert not crowd.waiting or now_opening == opening
        # Everybody who stays gets in when those inside come to an end.
        while crowd.inside:
            crowd.inside.pop().leave(reusable=True)
            await crowd.settle()
        assert not crowd.waiting

    run(story())
