"""The throughput-cliff detector: when to halve the batch, when to dare the next step back.

Law: pure; `step` is a function of (state, sample) alone and time is counted in samples. Samples come from
saturated windows only; None is a window in which there was nothing to prove.

How it can't oscillate: below the full batch, a level teaches its own throughput, so that what halving costs
by itself is no second cliff. A step back is a probe. One that fails doubles the time until the next. One that
shows the bigger batch to be the better one after all (or, the third time, not much worse) is accepted as the
new normal.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class CliffSettings:
    """lows samples in a row, each down by more than `drop` of what is usual, are a cliff. learn: samples
    until anything is usual. goods samples in a row of at least `recover` of the half of what the bigger
    batch gave, and dwell samples since the last change, lead one step back; so do `patience` dwells of any.
    dwell_max: where doubling ends. delay_factor: what each level makes of the delay. alpha: weight of the
    newest sample in what is usual. A probe that gives `better` times the smaller batch's throughput, or
    after `probes` failures no_worse times, is accepted. no_worse under (1 - n) / (1 + n) makes sure of that
    in noise of up to n. Raises ValueError for values that make no sense.
    """

    drop: float = 0.30
    lows: int = 2
    learn: int = 3
    recover: float = 0.90
    goods: int = 5
    dwell: int = 10
    dwell_max: int = 640
    patience: int = 6
    delay_factor: float = 1.5
    alpha: float = 0.2
    better: float = 1.1
    no_worse: float = 0.8
    probes: int = 3

    def __post_init__(self) -> None:
        for name in ("drop", "recover", "alpha", "no_worse"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} = {getattr(self, name):g}: more than 0, at most 1")
        for name in ("lows", "learn", "goods", "dwell", "patience", "probes", "delay_factor", "better"):
            if not getattr(self, name) >= 1:
                raise ValueError(f"{name} = {getattr(self, name):g}: at least 1")
        if self.dwell_max < self.dwell:
            raise ValueError(f"dwell_max = {self.dwell_max}: at least dwell ({self.dwell})")


@dataclass(frozen=True, slots=True)
class Cliff:
    """level: halvings in force. usual: throughput at levels 0 to `level`, the last one after `learned`
    samples of it; below: at level + 1, 0 where not known. held: samples since the last change. dwell: at
    least how many, 0: as set. failed: probes that failed in a row. cliffs: found so far, failed probes not
    counted; changes: of level, all of them.
    """

    level: int = 0
    usual: tuple[float, ...] = (0.0,)
    below: float = 0.0
    learned: int = 0
    lows: tuple[float, ...] = ()
    goods: int = 0
    held: int = 0
    dwell: int = 0
    probing: bool = False
    failed: int = 0
    cliffs: int = 0
    changes: int = 0


def step(it: Cliff, sample: float | None, how: CliffSettings, deepest: int) -> Cliff:
    """The state after one window. sample: tokens/s, None where the window wasn't saturated. deepest: the
    lowest level there is.
    """
    it = replace(it, held=it.held + 1)
    if it.probing and it.held > how.dwell and not it.lows:
        # The probe has proved itself; with the full batch back, old failures are forgotten.
        it = replace(it, probing=False) if it.level else replace(it, probing=False, failed=0, dwell=0)
    if sample is None:
        return _back(replace(it, lows=(), goods=it.goods + 1), how)
    if it.learned < how.learn:
        mean = (it.usual[-1] * it.learned + sample) / (it.learned + 1)
        return replace(it, usual=(*it.usual[:-1], mean), learned=it.learned + 1)
    if sample < (1 - how.drop) * it.usual[-1]:
        it = replace(it, lows=(*it.lows, sample), goods=0)
        return it if len(it.lows) < how.lows else _fallen(it, how, deepest)
    usual = it.usual[-1] + how.alpha * (sample - it.usual[-1])
    good = it.level > 0 and sample >= how.recover * it.usual[-2] / 2
    it = replace(it, lows=(), usual=(*it.usual[:-1], usual), goods=it.goods + 1 if good else 0)
    return _back(it, how)


def _fallen(it: Cliff, how: CliffSettings, deepest: int) -> Cliff:
    """Enough lows in a row: a cliff, a failed probe, or a new normal."""
    seen = sum(it.lows) / len(it.lows)
    failed = it.failed + it.probing
    better = 0 < it.below * how.better <= seen
    no_worse = failed >= how.probes and 0 < it.below * how.no_worse <= seen
    if it.level >= deepest or (it.probing and (better or no_worse)):
        return replace(it, usual=(*it.usual[:-1], seen), lows=(), probing=False, failed=0, dwell=0)
    down = replace(it, level=it.level + 1, lows=(), goods=0, held=0, probing=False, changes=it.changes + 1)
    if not it.probing:
        return replace(down, usual=(*it.usual, 0.0), learned=0, below=0.0, cliffs=it.cliffs + 1)
    known = how.learn if it.below else 0
    dwell = min(how.dwell_max, 2 * (it.dwell or how.dwell))
    return replace(down, usual=(*it.usual, it.below), learned=known, below=0.0, failed=failed, dwell=dwell)


def _back(it: Cliff, how: CliffSettings) -> Cliff:
    """One level back when it is time."""
    dwell = it.dwell or how.dwell
    calm = it.goods >= how.goods and it.held >= dwell
    if not it.level or not (calm or it.held >= how.patience * dwell):
        return it
    below = it.usual[-1] if it.learned >= how.learn else 0.0
    up = replace(it, level=it.level - 1, usual=it.usual[:-1], below=below, learned=how.learn)
    return replace(up, goods=0, held=0, lows=(), probing=True, changes=it.changes + 1)
