"""The load report that stands in every answer: ORCA in its text form, as Envoy 1.40 reads it.

Law: pure. `endpoint-load-metrics: TEXT name=value, …`; Envoy drops the whole report for one name that it
doesn't know, one that comes twice, or a value that is no finite number, so none of these leaves here.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from services.engine import EngineFacts, EngineStats

HEADER = "endpoint-load-metrics"
NAMED, KV = "named_metrics.", "kv_cache_usage_perc"
SAMPLE_S = 0.5
"""CPU time and rates are read at most so often; an answer costs nothing but the writing."""
WINDOW_S = 10.0
"""Rates are of the last so many seconds."""
_MOST, _LEAST = 1e12, 0.001
"""Envoy 1.40 refuses a report of no load at all ("QPS must be positive"), and logs an error for each."""


@dataclass(frozen=True, slots=True)
class Counts:
    """What rates are made of, since start: seconds of CPU, answers, answers that were errors of ours."""

    cpu_s: float
    answers: int
    errors: int


@dataclass(frozen=True, slots=True)
class Rates:
    """cpu: share of all CPUs that this process may use. answers, errors: per second."""

    cpu: float = 0.0
    answers: float = 0.0
    errors: float = 0.0


class Meter:
    """Rates over the last WINDOW_S; samples at most every SAMPLE_S. cpus: those this process may use."""

    def __init__(self, now: Callable[[], float], counts: Callable[[], Counts], cpus: float) -> None:
        self._now, self._counts, self._cpus = now, counts, max(cpus, 1.0)
        self._samples: deque[tuple[float, Counts]] = deque([(now(), counts())])
        self._rates = Rates()

    def rates(self) -> Rates:
        now = self._now()
        if now - self._samples[-1][0] >= SAMPLE_S:
            self._sample(now)
        return self._rates

    def _sample(self, now: float) -> None:
        self._samples.append((now, self._counts()))
        # One sample older than the window stays: it is where the window begins.
        while len(self._samples) > 2 and now - self._samples[1][0] >= WINDOW_S:
            self._samples.popleft()
        (start, then), (_, last) = self._samples[0], self._samples[-1]
        (before_s, before) = self._samples[-2]
        span = now - start
        self._rates = Rates(
            # CPU of the last sample alone: who steers by it wants to know what is, not what was.
            cpu=max(0.0, (last.cpu_s - before.cpu_s) / ((now - before_s) * self._cpus)),
            answers=(last.answers - then.answers) / span,
            errors=(last.errors - then.errors) / span,
        )


def utilization(facts: EngineFacts, stats: EngineStats, ended: int = 0) -> float:
    """Load relative to capacity: 1.0 is as much as it can run at once, more is queueing.

    The tightest of sequences and KV cache counts; an engine that believes to have half of its throughput
    (`capacity`) has twice the utilisation. Sequences, not requests: one with n = 16 takes 16 places, and one
    whose client is still reading may take none. ended: those of the answer that tells this which have given
    their places back already: what it tells is the load with itself in it.
    """
    sequences = stats.running + stats.waiting + ended
    shares = [stats.kv_used]
    if facts.sequences:
        shares.append(sequences / facts.sequences)
    return max(shares) / min(1.0, max(0.01, stats.capacity))


def report(facts: EngineFacts, stats: EngineStats, in_flight: int, rates: Rates, ended: int = 0) -> str:
    """The header's value. in_flight: requests. ended: as in `utilization`."""
    stats = _with_upstream_s_cache(facts, stats)
    ours = {
        "cpu_utilization": rates.cpu,
        "application_utilization": max(_LEAST, utilization(facts, stats, ended)),
        # The answer that carries this is one more.
        "rps_fractional": max(rates.answers, 0.0) + 1 / WINDOW_S,
        "eps": rates.errors,
        f"{NAMED}requests_in_flight": in_flight,
        f"{NAMED}queue": stats.waiting,
        f"{NAMED}{KV}": stats.kv_used,
    }
    # What a server behind says besides; of the same name, ours is newer and counts those who wait here too.
    values = {f"{NAMED}{name}": value for name, value in stats.named.items()} | ours
    parts = (f"{name}={_bounded(value):.4g}" for name, value in values.items() if not math.isnan(value))
    return "TEXT " + ", ".join(parts)


def _with_upstream_s_cache(facts: EngineFacts, stats: EngineStats) -> EngineStats:
    """Where the engine has no KV cache that it knows of, the server's word on its own is all there is."""
    told = stats.named.get(KV)
    return stats if facts.kv_tokens or told is None else replace(stats, kv_used=told)


def _bounded(value: float) -> float:
    """No utilisation is below 0, and rounding must not make an infinity of it."""
    return min(_MOST, max(0.0, value))
