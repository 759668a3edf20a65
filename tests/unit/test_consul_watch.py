"""Watch in virtual time with scripted answers: index rules, pace, back-off, what the callback hears."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from mesh.consul.errors import Forbidden, TooMany, Unreachable
from mesh.consul.watch import (
    LOCAL,
    REMOTE,
    REMOTE_WAIT_S,
    Tuning,
    Watch,
    answer_deadline_s,
    backoff_s,
    next_index,
)
from tests.virtual import run


class LoopClock:
    """The loop's time as a Clock."""

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()

    def time(self) -> float:
        return 1_000_000.0 + self.monotonic()

    async def sleep(self, s: float) -> None:
        await asyncio.sleep(s)


class Script:
    """A fetch that answers from a list: (seconds, index, value) or (seconds, exception); then hangs."""

    def __init__(self, steps: Sequence[tuple[Any, ...]]) -> None:
        self.steps = list(steps)
        self.asked: list[tuple[float, int, float]] = []

    async def __call__(self, index: int, wait_s: float) -> tuple[int, Any]:
        self.asked.append((asyncio.get_running_loop().time(), index, wait_s))
        if not self.steps:
            await asyncio.Event().wait()
        after_s, *answer = self.steps.pop(0)
        await asyncio.sleep(after_s)
        if isinstance(answer[0], Exception):
            raise answer[0]
        return answer[0], answer[1]


def play(
    script: Script,
    *,
    for_s: float,
    wait_s: float = 55.0,
    tuning: Tuning = LOCAL,
    on_value: Callable[[Any, int], None] | None = None,
) -> tuple[Watch[Any], list[tuple[float, Any, int]]]:
    """Run a watch for so many virtual seconds; gives it and what its callback heard (when, value, index)."""
    heard: list[tuple[float, Any, int]] = []

    def hear(value: Any, index: int) -> None:
        if on_value is not None:
            on_value(value, index)
        heard.append((asyncio.get_running_loop().time(), value, index))

    async def scene() -> Watch[Any]:
        watch = Watch(
            "w", script, hear, clock=LoopClock(), rng=random.Random(7), wait_s=wait_s, tuning=tuning
        )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(for_s):
                await watch.run()
        return watch

    return run(scene()), heard


def asked_indexes(script: Script) -> list[int]:
    return [index for _, index, _ in script.asked]


def test_first_answer_and_changes_are_told_equal_content_is_not() -> None:
    script = Script([(0, 5, "a"), (3, 6, "a"), (3, 7, "b"), (3, 8, "b"), (3, 9, "a")])
    watch, heard = play(script, for_s=30)
    assert [(value, index) for _, value, index in heard] == [("a", 5), ("b", 7), ("a", 9)]
    assert asked_indexes(script) == [0, 5, 6, 7, 8, 9]
    assert (watch.wakeups, watch.changes, watch.index, watch.error) == (5, 3, 9, None)


def test_index_backwards_starts_over_and_zero_becomes_one() -> None:
    script = Script([(0, 90, "a"), (1, 40, "b"), (0, 41, "b"), (1, 0, "b"), (0, 0, "b")])
    _, heard = play(script, for_s=30)
    assert asked_indexes(script) == [0, 90, 0, 41, 0, 1]
    assert [value for _, value, _ in heard] == ["a", "b"]


def test_woken_early_with_the_same_index_asks_anew() -> None:
    """What a snapshot restore looks like: old content and index at once, then a lower index."""
    script = Script(
        [(0, 50, "new"), (3, 50, "new"), (0, 20, "restored"), (55, 20, "restored"), (1, 60, "on")]
    )
    _, heard = play(script, for_s=120)
    assert asked_indexes(script) == [0, 50, 0, 20, 20, 60]
    assert [value for _, value, _ in heard] == ["new", "restored", "on"]


def test_answers_without_news_are_paced_harder() -> None:
    script = Script([(0, 5 + i, "same") for i in range(100_000)])
    watch, _ = play(script, for_s=10)
    assert watch.wakeups <= (LOCAL.burst + 10 * LOCAL.per_s) / LOCAL.idle_cost + 2


def test_errors_back_off_are_shown_and_never_end_the_watch() -> None:
    troubles = [
        Forbidden(403, "GET /x", "ACL not found"),
        TooMany(429, "GET /x", "too many"),
        Unreachable(0, "GET /x", "reset"),
        ValueError("no JSON"),
    ]
    script = Script([(0, 5, "a"), *((0, t) for t in troubles), (0, 5, "a"), (1, 6, "b")])
    watch, heard = play(script, for_s=60)
    assert [value for _, value, _ in heard] == ["a", "b"]
    assert watch.error is None
    # After an error it asks without an index: the other end may have lost its memory.
    assert asked_indexes(script) == [0, 5, 0, 0, 0, 0, 5, 6]


def test_a_standing_error_is_in_error_and_tries_go_on_at_the_longest_pause() -> None:
    script = Script([(0, 5, "a")] + [(0, Forbidden(403, "GET /x", "ACL not found"))] * 200)
    watch, heard = play(script, for_s=60)
    assert len(heard) == 1
    assert "ACL not found" in str(watch.error)
    times = [at for at, _, _ in script.asked]
    gaps = [b - a for a, b in pairwise(times)][8:]
    assert min(gaps) >= LOCAL.backoff_most_s / 2
    assert max(gaps) <= LOCAL.backoff_most_s
    assert len({round(g, 6) for g in gaps}) > len(gaps) / 2, "no jitter"


def test_an_answer_that_never_comes_is_given_up_and_asked_again() -> None:
    script = Script([(0, 5, "a"), (10_000, 6, "never"), (0, 6, "b")])
    _, heard = play(script, for_s=100)
    assert [value for _, value, _ in heard] == ["a", "b"]
    gave_up_at = script.asked[2][0]
    assert 55 + 55 / 16 + 5 <= gave_up_at <= 55 + 55 / 16 + 5 + 1


def test_a_remote_watch_lets_go_of_a_silent_datacenter_within_five_seconds() -> None:
    hang = (10_000, 6, "never")
    script = Script([(0, 5, "a"), hang, hang, hang, hang, (0, 6, "b")])
    _, heard = play(script, for_s=60, wait_s=REMOTE_WAIT_S, tuning=REMOTE)
    assert [value for _, value, _ in heard] == ["a", "b"]
    times = [at for at, _, _ in script.asked]
    gaps = [b - a for a, b in pairwise(times)]
    assert all(gap < 5 for gap in gaps)


def test_a_server_that_always_answers_at_once_is_paced() -> None:
    script = Script([(0, 5 + i, i) for i in range(100_000)])
    watch, heard = play(script, for_s=10)
    assert watch.wakeups <= LOCAL.burst + 10 * LOCAL.per_s + 1
    assert watch.wakeups >= 10 * LOCAL.per_s * 0.9
    assert heard[LOCAL.burst - 1][0] == 0, "a burst must not be slowed down"


def test_a_callback_that_raises_is_offered_the_value_again() -> None:
    calls: list[Any] = []

    def picky(value: Any, _: int) -> None:
        calls.append(value)
        if len(calls) < 3:
            raise RuntimeError("not now")

    script = Script([(0, 5, "a"), (0, 5, "a"), (0, 5, "a"), (1, 6, "b")])
    watch, heard = play(script, for_s=30, on_value=picky)
    assert calls == ["a", "a", "a", "b"]
    assert [value for _, value, _ in heard] == ["a", "b"]
    assert watch.error is None


def test_age_is_none_first_then_counts_from_the_last_answer() -> None:
    async def scene() -> None:
        script = Script([(2, 5, "a"), (3, 6, "b")])
        watch = Watch("w", script, lambda v, i: None, clock=LoopClock(), rng=random.Random(1))
        task = asyncio.create_task(watch.run())
        await asyncio.sleep(1)
        assert watch.age_s(1) is None
        await asyncio.sleep(11)
        assert watch.age_s(12) == 12 - 5
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run(scene())


@given(st.lists(st.tuples(st.integers(0, 2**40) | st.integers(0, 3), st.booleans()), max_size=50))
def test_index_rules_hold_for_any_row_of_answers(answers: list[tuple[int, bool]]) -> None:
    asked = 0
    for answered, early in answers:
        following = next_index(asked, answered, early)
        assert following >= 0
        if answered < asked:
            assert following == 0, "backwards: start over"
        elif early and answered == asked > 0:
            assert following == 0, "woken for nothing: start over"
        else:
            assert following == max(1, answered), "0 would not block"
        asked = following


@given(st.integers(1, 10_000), st.floats(0, 1, exclude_max=True))
def test_backoff_stays_between_half_the_first_and_the_longest(failures: int, chance: float) -> None:
    pause = backoff_s(LOCAL, failures, chance)
    assert LOCAL.backoff_first_s / 2 <= pause <= LOCAL.backoff_most_s


@given(st.floats(0.1, 600), st.floats(0.1, 10))
def test_deadline_leaves_room_for_consuls_own_jitter(wait_s: float, slack_s: float) -> None:
    assert answer_deadline_s(7, wait_s, slack_s) > wait_s * 17 / 16
    assert answer_deadline_s(0, wait_s, slack_s) == slack_s
