"""The cliff detector over hours: noise is no cliff, one that stays is probed ever more seldom, one that goes
is forgotten, and where no batch can be halved it is told all the same."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

import pytest

from services.batching.admission import limits
from services.batching.cliff import Cliff, CliffSettings, step
from services.batching.core import Core
from services.batching.model import BatchingSettings, Ticket
from services.batching.sampler import Governor
from services.engine import EngineFacts

HOW, DEEPEST = CliffSettings(), 4
HOUR = 3600
NOISE: dict[str, Callable[[Random, float], float]] = {
    "normal": lambda dice, sigma: max(0.0, dice.gauss(1, sigma)),
    "lognormal": lambda dice, sigma: dice.lognormvariate(0, sigma),
}


def through(
    model: Callable[[int, int], float | None], windows: int, deepest: int = DEEPEST, it: Cliff | None = None
) -> list[Cliff]:
    """The states where the sample is model(level, window)."""
    states = [it or Cliff()]
    for n in range(windows):
        states.append(step(states[-1], model(states[-1].level, n), HOW, deepest))
    return states[1:]


def probes_in(windows: float) -> float:
    """Most changes that waits allow which double from HOW.dwell: down, and up and down for each."""
    return 1 + 2 * math.ceil(math.log2(windows / HOW.dwell + 1))


@pytest.mark.parametrize(
    ("kind", "sigma", "seed"),
    [("normal", 0.1, 1), ("lognormal", 0.2, 2), ("normal", 0.3, 3), ("lognormal", 0.3, 4)],
)
def test_an_hour_of_noise_changes_nothing(kind: str, sigma: float, seed: int) -> None:
    dice = Random(seed)
    last = through(lambda level, _: 1000 / 1.2**level * NOISE[kind](dice, sigma), HOUR)[-1]
    assert (last.level, last.changes, last.cliffs) == (0, 0, 0)
    assert last.spread.sigma == pytest.approx(sigma, rel=0.5)


@pytest.mark.parametrize("left", [0.6, 0.5, 0.2])
@pytest.mark.parametrize("seed", range(5))
def test_in_usual_noise_a_cliff_is_found_after_two_samples(left: float, seed: int) -> None:
    dice = Random(seed)
    share = [1.0] * 30 + [left] * 2
    states = through(lambda _, n: share[n] * 1000 * (1 + dice.uniform(-0.1, 0.1)), 32)
    assert [state.level for state in states[-2:]] == [0, 1]


def test_single_samples_far_off_are_no_cliff_and_blind_nobody() -> None:
    dice = Random(5)
    noise = [1000 * (1 + dice.uniform(-0.1, 0.1)) for _ in range(400)]
    states = through(lambda _, n: noise[n] * (0.01 if n % 13 == 12 else 1), 400)
    assert states[-1].changes == 0
    assert through(lambda _, n: 500, 3, it=states[-1])[-1].level == 1


def too_big(level: int, window: int) -> float:
    """The full batch doesn't fit from window 50 on; any smaller one does as well as ever."""
    return 40 if window >= 50 and level == 0 else 100


def test_against_a_cliff_that_stays_the_changes_grow_with_the_logarithm_of_time() -> None:
    states = through(too_big, 20_000)
    assert states[-1].changes <= probes_in(20_000)
    assert states[-1].cliffs == 1
    late = [state.level for state in states[-10_000:]]
    assert late.count(1) / len(late) > 0.999


def test_one_that_stays_is_no_new_one_after_a_pause_and_none_that_waits_a_little() -> None:
    pauses = through(lambda level, n: too_big(level, n) if n % 200 < 40 or n < 60 else None, 20_000)
    assert pauses[-1].changes <= probes_in(20_000)

    hot = 0

    def heats_up(level: int, window: int) -> float:
        nonlocal hot
        hot = hot + 1 if level == 0 else 0
        return 40 if hot > 40 else 100

    assert through(heats_up, 20_000)[-1].changes <= probes_in(20_000)


@pytest.mark.parametrize("lasts", [5, 60, 700])
def test_after_one_that_passes_all_is_back_about_as_long_after(lasts: int) -> None:
    def model(level: int, window: int) -> float:
        return too_big(level, window) if window < 50 + lasts else 100 / 1.1**level

    states = through(model, 50 + 3 * lasts + 4 * HOW.dwell)
    assert max(state.level for state in states) == 1
    assert states[-1].level == 0
    assert states[-1].changes <= probes_in(lasts) + 1
    states = through(lambda *_: 100, HOW.remember * 2 * (lasts + HOW.dwell), it=states[-1])
    assert (states[-1].wait, states[-1].failed, states[-1].probing) == (0, 0, False), "and forgotten"


def test_where_the_batch_cant_be_halved_a_cliff_counts_and_what_is_left_is_told() -> None:
    states = through(lambda _, n: 100 if n < 50 or n >= 80 else 20, 110, deepest=0)
    assert [state.cliffs for state in states[50:53]] == [0, 1, 1]
    assert {round(state.left, 2) for state in states[51:80]} == {0.2}
    assert (states[-1].left, states[-1].level, states[-1].changes) == (1.0, 0, 0)
    stays = through(lambda _, n: 100 if n < 50 else 20, 50 + 2 + HOW.settle, deepest=0)
    assert (stays[-2].left, stays[-1].left) == (pytest.approx(0.2), 1.0), "the new normal, in the end"
    assert stays[-1].cliffs == 1


@pytest.mark.parametrize("sequences", [1, 8])
def test_an_engine_of_few_sequences_tells_its_cliff_and_that_it_is_over_also_when_idle(
    sequences: int,
) -> None:
    how = BatchingSettings(sample_steps=1)
    core: Core[Ticket] = Core(how, limits(EngineFacts("x", sequences=sequences), how))
    governor = Governor(how, core)
    tickets = [Ticket(1, 0, 0.0) for _ in range(2 * sequences)]
    for one in tickets:
        core.submit(one, 0.0)
    core.start(0.0)
    governor.wake(0.0)
    for now in range(1, 13):
        governor.tokens += 1000 if now <= 10 else 250
        governor.look(float(now))
    assert (governor.state.cliffs, governor.state.level, core.places) == (1, 0, sequences)
    assert governor.capacity == pytest.approx(0.25)
    for one in tickets:
        core.finish(one, 12.0)
    core.start(12.0)
    while governor.at < math.inf:
        governor.look(governor.at)
    assert governor.capacity == 1.0
