"""The cliff detector: finds cliffs, recovers when they pass, and never oscillates."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.batching.admission import limits
from services.batching.cliff import Cliff, CliffSettings, step
from services.batching.core import Core
from services.batching.model import BatchingSettings, Ticket
from services.batching.sampler import Governor
from services.engine import EngineFacts

HOW = CliffSettings()
DEEPEST = 4
MOST_OPEN_LOOP = 2 * HOW.probes
"""Changes that one cliff can cause where the batch doesn't matter: down, and three probes of which the last
is accepted at the latest."""


Model = Callable[[int, int], float]
"""Throughput at a level, in a window."""


def fed(samples: Sequence[float | None], state: Cliff | None = None) -> list[Cliff]:
    """The states after each sample."""
    states = [state or Cliff()]
    for sample in samples:
        states.append(step(states[-1], sample, HOW, DEEPEST))
    return states[1:]


def played(
    model: Callable[[int, int], float], windows: int, noise: float = 0.0, seed: int = 0
) -> list[Cliff]:
    """The states where throughput is model(level, window), with noise."""
    dice, states = Random(seed), [Cliff()]
    for n in range(windows):
        sample = model(states[-1].level, n) * (1 + dice.uniform(-noise, noise))
        states.append(step(states[-1], sample, HOW, DEEPEST))
    return states[1:]


def test_two_lows_in_a_row_are_a_cliff_and_one_is_none() -> None:
    assert fed([100] * 5 + [60])[-1].level == 0
    assert fed([100] * 5 + [60, 100, 60, 100, 60])[-1].level == 0
    assert fed([100] * 5 + [71, 71, 71])[-1].level == 0
    found = fed([100] * 5 + [69, 69])[-1]
    assert (found.level, found.cliffs, found.changes) == (1, 1, 1)


def test_nothing_is_usual_yet_nothing_is_a_cliff() -> None:
    assert fed([100, 60, 20])[-1].level == 0


def test_a_window_that_proves_nothing_breaks_the_row() -> None:
    assert fed([100.0] * 5 + [60.0, None, 60.0])[-1].level == 0


@given(value=st.floats(0, 1e9), count=st.integers(0, 300))
def test_the_constant_never_degrades(value: float, count: int) -> None:
    assert all(state.changes == 0 for state in fed([value] * count))


@settings(deadline=None)
@given(noise=st.lists(st.floats(-0.1, 0.1), max_size=400), value=st.floats(1, 1e6))
def test_noise_of_a_tenth_never_degrades(noise: list[float], value: float) -> None:
    assert all(state.changes == 0 for state in fed([value * (1 + n) for n in noise]))


@settings(deadline=None, max_examples=60)
@given(
    left=st.floats(0.01, 1.0),
    noise=st.lists(st.floats(-0.1, 0.1), min_size=50, max_size=800),
)
def test_a_cliff_that_stays_causes_few_changes_whatever_the_noise(left: float, noise: list[float]) -> None:
    level = [1.0] * 20 + [left] * (len(noise) - 20)
    states = fed([share * 1000 * (1 + n) for share, n in zip(level, noise, strict=True)])
    assert states[-1].changes <= MOST_OPEN_LOOP


MODELS: dict[str, Callable[[int, float], float]] = {
    # Throughput at a level, given what is left of the engine: bound by memory, by compute, in between.
    "halves with the batch": lambda level, left: left * 1000 / 2**level,
    "doesn't care": lambda level, left: left * 1000,
    "in between": lambda level, left: left * 1000 / 1.4**level,
}


@settings(deadline=None, max_examples=60)
@given(
    name=st.sampled_from(sorted(MODELS)),
    left=st.floats(0.05, 0.69),
    noise=st.floats(0, 0.1),
    length=st.integers(10, 200),
    seed=st.integers(0, 10**6),
)
def test_after_a_cliff_that_passes_all_is_as_before(
    name: str, left: float, noise: float, length: int, seed: int
) -> None:
    model = MODELS[name]
    states = played(lambda level, n: model(level, left if 20 <= n < 20 + length else 1.0), 1200, noise, seed)
    assert (states[-1].level, states[-1].probing) == (0, False)
    assert states[-1].changes <= 2 * MOST_OPEN_LOOP
    changed = [n for n, (a, b) in enumerate(pairwise(states)) if a.level != b.level]
    assert all(n < 20 + length + HOW.dwell_max for n in changed)
    if left < 0.7 / 1.1 / 1.1 * (1 - noise) and length >= 10:
        assert states[-1].cliffs >= 1  # seen at all
    assert states[-1].usual[0] == pytest.approx(1000, rel=0.15)


def thrash(level: int, window: int) -> float:
    """The full batch doesn't fit since window 20: half the throughput; the halved one does nearly all."""
    return 500 if window >= 20 and level == 0 else 1000 / 1.2**level


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_a_batch_that_stays_too_big_is_probed_ever_more_rarely(noise: float) -> None:
    states = played(thrash, 3000, noise)
    assert states[-1].cliffs == 1
    changed = [n for n, (a, b) in enumerate(pairwise(states)) if a.level != b.level]
    pauses = [b - a for a, b in pairwise(changed)][1::2]  # at the full batch: short
    assert all(pause <= 5 for pause in pauses)
    rests = [b - a for a, b in pairwise(changed)][0::2]
    assert rests == sorted(rests)
    assert len(changed) <= 1 + 2 * math.log2(3000 / HOW.dwell)
    assert sum(state.level for state in states[30:]) / len(states[30:]) > 0.95  # it stays where it is good


def test_dwell_is_kept_between_changes_upwards() -> None:
    states = fed([100] * 5 + [50] * 5 + [100] * 40)
    changed = [n for n, (a, b) in enumerate(pairwise(states)) if a.level != b.level]
    assert len(changed) == 2
    assert changed[1] - changed[0] == HOW.dwell


def test_without_load_it_recovers_too() -> None:
    degraded = fed([100] * 5 + [50, 50])[-1]
    assert degraded.level == 1
    states = fed([None] * (HOW.dwell + 1), degraded)
    assert states[-1].level == 0
    assert [state.level for state in states[: HOW.dwell - 1]] == [1] * (HOW.dwell - 1)


def test_a_new_normal_is_accepted_when_the_bigger_batch_is_the_better_one() -> None:
    states = played(lambda level, n: (100 if n < 20 else 40) / 2**level, 300)
    assert states[-1].level == 0
    assert states[-1].changes == 2
    assert states[-1].usual == (pytest.approx(40),)


def test_where_the_batch_makes_no_difference_the_third_probe_is_the_last() -> None:
    states = played(lambda level, n: 1000 if n < 20 else 550, 3000)
    assert (states[-1].level, states[-1].changes) == (0, MOST_OPEN_LOOP)
    assert states[-1].usual == (pytest.approx(550),)


def test_there_is_a_floor() -> None:
    falling = [100.0] * 5
    while falling[-1] > 0.001:
        falling += [falling[-1] / 2] * 5
    states = fed(falling)
    assert max(state.level for state in states) == DEEPEST
    assert step(Cliff(usual=(100.0,), learned=3, lows=(1.0,)), 1.0, HOW, 0).level == 0


def governed(batch: int = 32, **change: float) -> tuple[Core[Ticket], Governor[Ticket]]:
    how = BatchingSettings(batch_size=batch, concurrency=1, sample_steps=4, queue_limit=10**6, **change)  # type: ignore[arg-type]
    core: Core[Ticket] = Core(how, limits(EngineFacts("x"), how))
    return core, Governor(how, core)


def test_windows_count_only_while_work_waits_and_wait_for_steps_enough() -> None:
    core, governor = governed(batch=4)
    for _ in range(6):
        core.submit(Ticket(1, 0, 0.0), 0.0)
    running = core.start(0.0)
    governor.wake(0.0)
    governor.tokens = 15  # four sequences at four steps are sixteen
    governor.look(1.0)
    assert governor.state.learned == 0
    governor.tokens = 32
    governor.look(2.0)
    assert governor.state.usual == (16.0,)
    for one in running[:3]:  # two that waited begin; one place stays free
        core.finish(one, 2.5)
    core.start(2.5)
    governor.tokens = 100
    governor.look(3.0)
    assert governor.state.learned == 1
    for one in running[3:]:
        core.finish(one, 3.5)
    governor.look(4.0)
    assert governor.at < math.inf


def test_an_engine_that_all_but_stops_is_seen_and_its_batch_halved() -> None:
    core, governor = governed()
    for _ in range(100):
        core.submit(Ticket(1, 0, 0.0), 0.0)
    core.start(0.0)
    governor.wake(0.0)
    now = 0.0
    while now < 60:
        now += 1.0
        governor.tokens += 3200 if now <= 10 else 1
        governor.look(now)
    assert (governor.capacity, core.batch, core.places) == (0.5, 16, 16)
    assert core.delay_s == pytest.approx(0.075)


def test_a_window_in_which_nothing_came_or_went_is_not_saturated_for_that() -> None:
    core, governor = governed(batch=4)
    core.submit(Ticket(1, 0, 0.0), 0.0)
    core.start(0.0)
    governor.wake(0.0)
    for now in range(1, 6):  # one long sequence, three places free
        governor.tokens += 100
        governor.look(float(now))
    assert governor.state.learned == 0


def test_idle_it_finds_back_to_the_full_batch() -> None:
    core, governor = governed()
    waiting = [Ticket(1, 0, 0.0) for _ in range(100)]
    for one in waiting:
        core.submit(one, 0.0)
    core.start(0.0)
    governor.wake(0.0)
    for now in range(1, 8):
        governor.tokens += 3200 if now <= 5 else 320
        governor.look(float(now))
    assert core.places == 16
    for one in waiting:
        core.finish(one, 7.0)
    core.start(7.0)
    while governor.at < math.inf:
        governor.look(governor.at)
    assert (core.places, governor.state.level) == (32, 0)


def test_the_governor_rests_when_nothing_runs_and_nothing_is_degraded() -> None:
    core, governor = governed()
    one = Ticket(1, 0, 0.0)
    core.submit(one, 0.0)
    core.start(0.0)
    governor.wake(0.0)
    assert governor.at == 1.0
    core.finish(one, 0.5)
    core.start(0.5)
    governor.look(1.0)
    assert governor.at == math.inf
    assert governor.state.learned == 0
