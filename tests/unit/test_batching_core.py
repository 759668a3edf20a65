"""The scheduler's core, rule by rule: what is refused, who goes when, what ends whom."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.batching.admission import OPEN_ENDED_TOKENS, Rate, backoff_s, limits, need, retry_after_s
from services.batching.core import Core
from services.batching.model import BatchingSettings, Late, Phase, Ticket
from services.batching.order import Alarms, Queue
from services.faults import Refused
from tests.unit.tickets import come, core, facts, ticket


@pytest.mark.parametrize(
    ("sequences", "continuous", "places", "lanes", "batch"),
    [
        (0, True, 512, 4, 128),
        (0, False, 512, 4, 128),
        (256, True, 256, 2, 128),
        (100, True, 100, 1, 100),
        (300, False, 256, 2, 128),  # two whole batches; a third would be a part of one
        (1, False, 1, 1, 1),
    ],
)
def test_the_engine_bounds_what_the_settings_ask(
    sequences: int, continuous: bool, places: int, lanes: int, batch: int
) -> None:
    found = limits(facts(sequences, continuous=continuous), BatchingSettings())
    assert (found.places, found.lanes, found.batch) == (places, lanes, batch)


@pytest.mark.parametrize(
    ("size", "most", "code", "param"),
    [
        (4000, 97, "context_length_exceeded", "max_tokens"),
        (4096, 1, "context_length_exceeded", "prompt"),
        (1000, 601, "kv_never_fits", "max_tokens"),
    ],
)
def test_what_no_waiting_can_cure_is_refused_at_once(size: int, most: int, code: str, param: str) -> None:
    with pytest.raises(Refused) as refused:
        need(size, most, limits(facts(kv_tokens=1600), BatchingSettings()))
    assert (refused.value.status, refused.value.code, refused.value.param) == (400, code, param)


@pytest.mark.parametrize(("size", "most", "blocks"), [(1000, 600, 100), (1, 1, 1), (0, 17, 2), (15, 1, 1)])
def test_kv_is_counted_in_whole_blocks(size: int, most: int, blocks: int) -> None:
    assert need(size, most, limits(facts(kv_tokens=1600), BatchingSettings())) == blocks


def test_with_a_window_a_long_sequence_books_no_more_than_it_ever_holds() -> None:
    """A cache of 1600 tokens serves all of a context of 4096 where 512 are looked back at."""
    room = limits(replace(facts(kv_tokens=1600), kv_window=512, kv_chunk=256), BatchingSettings())
    assert need(3000, 1000, room) == need(2000, 1000, room) == (512 + 256 - 2 + 15) // 16 + 1
    assert need(3000, 1000, room, open_ended=True) == need(3000, 1000, room)
    assert need(100, 20, room) == 8
    narrow = limits(replace(facts(kv_tokens=700), kv_window=512, kv_chunk=256), BatchingSettings())
    with pytest.raises(Refused, match="whole cache has 43"):
        need(3000, 1000, narrow)


def test_an_answer_of_no_named_length_books_what_answers_usually_need() -> None:
    room = limits(facts(kv_tokens=3200), BatchingSettings())
    assert need(100, 3000, room, open_ended=True) == need(100, OPEN_ENDED_TOKENS, room)
    assert need(100, 20, room, open_ended=True) == need(100, 20, room)
    with pytest.raises(Refused, match="whole cache"):
        need(100, 3200, room, open_ended=True)


def test_a_lone_request_goes_at_once() -> None:
    for continuous in (True, False):
        it = core(facts(continuous=continuous))
        assert it.start(0) == []
        assert come(it, 1.0) == it.start(1.0)


STATIC = {"batch_size": 4, "concurrency": 2, "max_delay_ms": 50.0}


def busy() -> Core[Ticket]:
    """A static engine with one lane taken by a lone request, at 0."""
    it = core(facts(continuous=False), **STATIC)
    come(it, 0.0)
    assert len(it.start(0.0)) == 1
    return it


def test_a_batch_leaves_when_it_is_full() -> None:
    it = busy()
    come(it, 0.010, 3)
    assert it.start(0.010) == []
    come(it, 0.020, 3)
    assert len(it.start(0.020)) == 4
    come(it, 0.030, 9)
    assert it.start(1.0) == []  # both lanes are taken
    assert (it.running, it.queued) == (5, 11)


def test_or_when_its_oldest_has_waited_long_enough() -> None:
    it = busy()
    old, *_ = come(it, 0.010), come(it, 0.040)
    assert it.next_at() == pytest.approx(0.060)
    assert it.start(0.0599) == []
    it.finish(old[0], 0.0599)
    assert it.start(0.0601) == []  # the one that is left came later
    assert it.next_at() == pytest.approx(0.090)
    assert len(it.start(0.0901)) == 1


def test_a_lane_opens_when_it_is_empty_and_not_before() -> None:
    it = core(facts(4, continuous=False), **STATIC)
    first = come(it, 0.0, 4)
    assert it.start(0.0) == first
    come(it, 0.1, 4)
    for one in first[:3]:
        it.finish(one, 0.2)
        assert it.start(0.2) == []
    it.finish(first[3], 0.2)
    assert len(it.start(0.2)) == 4


def test_a_place_that_comes_free_on_a_continuous_engine_is_the_next_ones() -> None:
    it = core(facts(4))
    first = come(it, 0.0, 6)
    assert it.start(0.0) == first[:4]
    it.finish(first[2], 0.1)
    assert it.start(0.1) == [first[4]]


def test_kv_that_does_not_fit_now_waits_and_holds_up_those_behind() -> None:
    it = core(facts(kv_tokens=160))
    big, bigger, small = ticket(blocks=6), ticket(blocks=7), ticket(blocks=1)
    for one in (big, bigger, small):
        it.submit(one, 0.0)
    assert it.start(0.0) == [big]
    assert it.next_at() == math.inf or it.next_at() > 0
    it.finish(big, 1.0)
    assert it.start(1.0) == [bigger, small]
    assert it.kv_blocks == 8


def test_a_static_batch_that_waits_for_kv_asks_for_no_timer() -> None:
    it = core(facts(continuous=False, kv_tokens=160), **STATIC)
    first, second = ticket(blocks=9), ticket(blocks=9)
    it.submit(first, 0.0)
    it.start(0.0)
    it.submit(second, 0.0)
    assert it.start(1.0) == []
    assert it.next_at() > 1.0  # only a place that comes free helps: no busy waiting
    it.finish(first, 2.0)
    assert it.start(2.0) == [second]


def test_the_better_class_goes_first_unless_the_other_waited_its_worth() -> None:
    it = core(facts(1), ageing_s=5)
    order = [
        ticket(t, rank=rank)
        for t, rank in ((0.0, 2), (0.0, 2), (1.0, 1), (2.0, 0), (2.0, 1), (9.9, 0), (10.1, 0))
    ]
    for one in order:
        it.submit(one, one.arrived)
    gone: list[Ticket] = []
    while begun := it.start(20.0):
        gone += begun
        it.finish(begun[0], 20.0)
    assert [order.index(one) for one in gone] == [3, 2, 4, 5, 0, 1, 6]


def test_a_retry_keeps_its_place_in_the_order() -> None:
    it = core(facts(1))
    first, second = come(it, 0.0, 2)
    assert it.start(0.0) == [first]
    it.again(first, 0.5)
    assert it.start(0.0) == [second]
    (third,) = come(it, 0.1)
    assert (it.queued, it.delayed) == (1, 1)
    assert it.due(0.6) == []
    it.finish(second, 0.6)
    assert it.start(0.6) == [first]
    it.finish(first, 0.7)
    assert it.start(0.7) == [third]


def test_only_one_that_runs_can_be_tried_again() -> None:
    it = core(facts(1))
    _, second = come(it, 0.0, 2)
    it.start(0.0)
    with pytest.raises(RuntimeError, match="QUEUED"):
        it.again(second, 1.0)


def test_deadlines_in_the_queue_and_with_a_place() -> None:
    it = core(facts(1))
    running, queued = ticket(deadline=2.0), ticket(deadline=1.0)
    it.submit(running, 0.0)
    it.submit(queued, 0.0)
    it.start(0.0)
    assert it.next_at() == 1.0
    assert it.due(1.0) == [(queued, Late.DEADLINE)]
    assert (queued.phase, it.queued) == (Phase.GONE, 0)
    assert it.due(2.5) == [(running, Late.DEADLINE)]
    assert (running.phase, it.running) == (Phase.PLACED, 1)  # until the engine let go
    it.finish(running, 2.6)
    it.finish(running, 2.7)
    assert (it.running, it.finished, it.next_at()) == (0, 2, math.inf)


def test_silence_is_found_to_the_moment_though_it_is_put_off_untold() -> None:
    it = core(first_token_s=10, idle_s=4)
    (one,) = come(it, 0.0)
    it.start(0.0)
    one.stall_at = 10.0
    spoken = (3.0, 6.5, 9.0)
    now = 0.0
    while not (late := it.due(now)):
        for moment in spoken:
            if now <= moment < it.next_at():
                one.stall_at = moment + 4
        assert it.next_at() > now
        now = it.next_at()
    assert (late, now) == ([(one, Late.SILENT)], 13.0)


def test_a_first_token_that_shortens_the_limit_is_no_excuse() -> None:
    it = core(first_token_s=10, idle_s=4)
    (one,) = come(it, 0.0)
    it.start(0.0)
    one.stall_at = 10.0
    assert it.due(4.5) == []
    one.stall_at = 5.0 + 4  # the first token came at 5
    now = 5.0
    while not it.due(now):
        now = it.next_at()
    assert now == 9.0


def test_a_full_queue_refuses_with_the_time_it_takes_to_drain() -> None:
    it = core(facts(1), queue_limit=3)
    for n in range(40):  # four a second
        (one,) = come(it, n / 4)
        it.start(n / 4)
        it.finish(one, n / 4)
    come(it, 10.0)
    it.start(10.0)
    come(it, 10.0, 3)
    with pytest.raises(Refused) as refused:
        come(it, 10.0)
    assert (refused.value.status, refused.value.code) == (429, "queue_full")
    assert refused.value.retry_after_s == pytest.approx(1.0, rel=0.15)


def test_throttled_it_takes_fewer_and_throws_none_out() -> None:
    it = core(facts(8))
    first = come(it, 0.0, 12)
    assert len(it.start(0.0)) == 8
    it.throttle(0.25, 2.25)
    assert (it.places, it.running, it.delay_s) == (2, 8, pytest.approx(0.1125))
    for one in first[:6]:
        it.finish(one, 1.0)
        assert it.start(1.0) == []
    it.finish(first[6], 1.0)
    assert it.start(1.0) == [first[8]]
    it.throttle(1.0, 1.0)
    assert len(it.start(1.0)) == 3


def test_a_rate_follows_the_events_and_forgets() -> None:
    rate = Rate()
    assert rate.per_s(0.0) == 0
    for n in range(200):
        rate.count(n / 10)
    assert rate.per_s(20.0) == pytest.approx(10, rel=0.1)
    assert rate.per_s(100.0) == 0
    assert [retry_after_s(9, 0), retry_after_s(9, 10), retry_after_s(0, 1e9), retry_after_s(10**6, 1)] == [
        1.0,
        1.0,
        0.1,
        60.0,
    ]


@given(tries=st.integers(1, 30), dice=st.floats(0, 1))
def test_pauses_grow_by_half_to_a_bound(tries: int, dice: float) -> None:
    how = BatchingSettings(backoff_base_s=0.1, backoff_max_s=3, jitter=0.2)
    pause = backoff_s(how, tries, dice)
    assert pause == pytest.approx(min(3, 0.1 * 1.5 ** (tries - 1)) * (1 - 0.2 * dice))


@pytest.mark.parametrize("bad", [{"batch_size": 0}, {"jitter": 2}, {"idle_s": 0}, {"max_delay_ms": math.nan}])
def test_settings_that_make_no_sense_are_named(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        BatchingSettings(**bad)  # type: ignore[arg-type]


def test_dead_entries_are_swept_out() -> None:
    queue, alarms = Queue[Ticket](), Alarms[Ticket]()
    for n in range(10_000):
        one = ticket()
        one.number, one.phase = n, Phase.QUEUED
        queue.add(one)
        alarms.arm(one, 1e6 + n)
        one.phase = Phase.GONE
        queue.forget()
        alarms.disarm(one)
    assert len(queue) == 0
    assert len(queue._heap) < 200
    assert len(alarms._heap) < 200
    assert alarms.next_at() == math.inf
