"""The throughput-cliff detector: when to halve the batch, when to dare the next step back.

Law: pure; `step` is a function of (state, sample) alone and time is counted in samples. Samples come from
saturated windows only; None is a window in which there was nothing to prove.

What a cliff is: at least `lows` samples in a row, each down by more than `drop`, which together lie farther
below the usual than the noise that was measured (services/batching/spread.py) ever brings them.

How it can't oscillate: below the full batch, a level teaches its own throughput, so that what halving costs
by itself is no second cliff. A step back is a probe. The wait for the next doubles whenever the bigger batch
fails within `remember` times the wait before it, so that against a cliff that stays the changes grow with
the logarithm of time. Probing never ends: where a batch is too big, the smaller one runs as well after the
cliff as during it, and nothing but a probe can tell. So it is back, at the latest, about as long after the
cliff as that lasted. A probe that shows the bigger batch to be the better one after all (or, the third time,
not much worse) is accepted as the new normal.

Where the batch can't be halved (any more) a cliff is one all the same: it counts, and the share of throughput
that is left is told, until it is back or, after `settle` samples, is what is normal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from services.batching.spread import Spread


@dataclass(frozen=True, slots=True)
class CliffSettings:
    """lows samples in a row, each down by more than `drop` of what is usual, are a cliff if they are `sure`
    standard deviations from it together. learn: samples until anything is usual. goods samples in a row of at
    least `recover` of the half of what the bigger batch gave, and dwell samples since the last change, lead
    one step back; so do `patience` dwells of any. dwell_max: where doubling ends; remember: as said above, in
    waits. delay_factor: what each level makes of the delay. alpha: weight of the newest sample in what is
    usual. A probe that gives `better` times the smaller batch's throughput, or after `probes` failures
    no_worse times, is accepted. no_worse under (1 - n) / (1 + n) makes sure of that in noise of up to n.
    settle: samples after which what is left at the smallest batch is the new normal. Raises ValueError for
    values that make no sense.
    """

    drop: float = 0.30
    lows: int = 2
    sure: float = 4.5
    learn: int = 3
    recover: float = 0.90
    goods: int = 5
    dwell: int = 10
    dwell_max: int = 86_400
    remember: int = 8
    patience: int = 6
    delay_factor: float = 1.5
    alpha: float = 0.2
    better: float = 1.1
    no_worse: float = 0.8
    probes: int = 3
    settle: int = 80

    def __post_init__(self) -> None:
        for name in ("drop", "recover", "alpha", "no_worse"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} = {getattr(self, name):g}: more than 0, at most 1")
        least_one = ("lows", "learn", "goods", "dwell", "remember", "patience", "probes", "settle")
        for name in (*least_one, "delay_factor", "better"):
            if not getattr(self, name) >= 1:
                raise ValueError(f"{name} = {getattr(self, name):g}: at least 1")
        if not self.sure >= 0:
            raise ValueError(f"sure = {self.sure:g}: at least 0")
        if self.dwell_max < self.dwell:
            raise ValueError(f"dwell_max = {self.dwell_max}: at least dwell ({self.dwell})")


@dataclass(frozen=True, slots=True)
class Cliff:
    """level: halvings in force. usual: throughput at levels 0 to `level`, the last one after `learned`
    samples of it; below: at level + 1, 0 where not known. before: throughput before a cliff that no halving
    answered, 0: none. held: samples since the last change; proof: those of them that were saturated. wait:
    samples before the next step back, 0: as set. risen: the last change was a step back; probing: and has yet
    to prove itself. failed: probes that failed in a row. cliffs: found so far, failed probes not counted;
    changes: of level, all of them.
    """

    level: int = 0
    usual: tuple[float, ...] = (0.0,)
    spread: Spread = field(default_factory=Spread)
    below: float = 0.0
    before: float = 0.0
    learned: int = 0
    lows: tuple[float, ...] = ()
    goods: int = 0
    held: int = 0
    proof: int = 0
    wait: int = 0
    risen: bool = False
    probing: bool = False
    failed: int = 0
    cliffs: int = 0
    changes: int = 0

    @property
    def left(self) -> float:
        """Share of the throughput that is left where the batch could not be halved; 1: all."""
        return min(1.0, max(0.01, self.usual[-1] / self.before)) if self.before else 1.0


def step(it: Cliff, sample: float | None, how: CliffSettings, deepest: int) -> Cliff:
    """The state after one window. sample: tokens/s, None where the window wasn't saturated. deepest: the
    lowest level there is.
    """
    it = replace(it, held=it.held + 1)
    if it.before and it.held >= how.settle:
        it = replace(it, before=0.0)
    if sample is None:
        return _back(replace(_taught(it, how), goods=it.goods + 1), how)
    it = replace(it, proof=it.proof + 1)
    if it.learned < how.learn:
        return _learnt(it, sample)
    if sample < (1 - how.drop) * it.usual[-1]:
        it = replace(it, lows=(*it.lows, sample), goods=0)
        return _fallen(it, how, deepest) if _sure(it, how) else it
    it = _fed(_taught(it, how), sample, how)
    good = it.level > 0 and sample >= how.recover * it.usual[-2] / 2
    return _back(_proved(replace(it, goods=it.goods + 1 if good else 0), how), how)


def _learnt(it: Cliff, sample: float) -> Cliff:
    spread = it.spread.seen(sample, it.usual[-1]) if it.learned else it.spread
    mean = (it.usual[-1] * it.learned + sample) / (it.learned + 1)
    return replace(it, usual=(*it.usual[:-1], mean), spread=spread, learned=it.learned + 1)


def _fed(it: Cliff, sample: float, how: CliffSettings) -> Cliff:
    """What is usual, and how far from it samples lie, with one more. Far down counts as far as noise goes."""
    usual = it.usual[-1]
    seen = max(sample, usual * (1 - it.spread.most))
    now = usual + how.alpha * (seen - usual)
    over = it.before and now >= how.recover * it.before
    spread = it.spread.seen(sample, usual)
    return replace(it, usual=(*it.usual[:-1], now), spread=spread, before=0.0 if over else it.before)


def _taught(it: Cliff, how: CliffSettings) -> Cliff:
    """A row of lows has ended and was none: it was noise, and counts as such."""
    for low in it.lows:
        it = _fed(it, low, how)
    return replace(it, lows=()) if it.lows else it


def _sure(it: Cliff, how: CliffSettings) -> bool:
    """Whether the lows are no noise. n samples of noise have a sum with a deviation of sqrt(n); none of them
    alone says more than `sure`, since single outliers are no cliffs."""
    under = sum(min(how.sure, it.spread.under(low, it.usual[-1])) for low in it.lows)
    return len(it.lows) >= how.lows and under >= how.sure * math.sqrt(len(it.lows))


def _proved(it: Cliff, how: CliffSettings) -> Cliff:
    """A probe proves itself by saturated samples alone; old failures are forgotten much later."""
    if it.probing and it.proof > how.dwell:
        it = replace(it, probing=False)
    if not it.level and it.risen and it.proof >= how.remember * (it.wait or how.dwell):
        it = replace(it, wait=0, failed=0, risen=False)
    return it


def _fallen(it: Cliff, how: CliffSettings, deepest: int) -> Cliff:
    """A cliff, a failed probe, or a new normal."""
    seen = sum(it.lows) / len(it.lows)
    failed = it.failed + it.probing
    better = 0 < it.below * how.better <= seen
    no_worse = failed >= how.probes and 0 < it.below * how.no_worse <= seen
    if it.level >= deepest:
        was, usual = it.before or it.usual[-1], (*it.usual[:-1], seen)
        return replace(it, usual=usual, before=was, lows=(), held=0, proof=0, cliffs=it.cliffs + 1)
    if it.probing and (better or no_worse):
        return replace(it, usual=(*it.usual[:-1], seen), lows=(), probing=False, failed=0, wait=0)
    down = replace(
        it,
        level=it.level + 1,
        lows=(),
        goods=0,
        held=0,
        proof=0,
        wait=_next_wait(it, how),
        risen=False,
        probing=False,
        changes=it.changes + 1,
    )
    if not it.probing:
        return replace(down, usual=(*it.usual, 0.0), learned=0, below=0.0, cliffs=it.cliffs + 1)
    known = how.learn if it.below else 0
    return replace(down, usual=(*it.usual, it.below), learned=known, below=0.0, failed=failed)


def _next_wait(it: Cliff, how: CliffSettings) -> int:
    """Twice as long where the bigger batch didn't last; deeper still is the same cliff."""
    wait = it.wait or how.dwell
    if not it.risen:
        return wait
    return min(how.dwell_max, 2 * wait) if it.proof <= how.remember * wait else how.dwell


def _back(it: Cliff, how: CliffSettings) -> Cliff:
    """One level back when it is time. After a step that proved itself the next one needn't wait so long."""
    wait = how.dwell if it.risen and not it.probing else it.wait or how.dwell
    calm = it.goods >= how.goods and it.held >= wait
    if not it.level or not (calm or it.held >= how.patience * wait):
        return it
    below = it.usual[-1] if it.learned >= how.learn else 0.0
    up = replace(it, level=it.level - 1, usual=it.usual[:-1], below=below, learned=how.learn, before=0.0)
    return replace(up, goods=0, held=0, proof=0, lows=(), risen=True, probing=True, changes=it.changes + 1)
