"""Counting what sequences do, at a price that a token can pay.

Law: pure; seconds come in as a function. Plain integers and lists instead of the client library's counters:
one thread writes and reads, and those take a lock for each (a token costs about half a microsecond here). How
the figures are named stands in services/telemetry/metrics.py.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


def _bounds(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.split()))


TOKEN_S = _bounds(
    "0.001 0.0025 0.005 0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 80"
)
FIRST_S = _bounds(
    "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10 20 40 80 160 640 2560"
)
REQUEST_S = _bounds("0.01 0.05 0.1 0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680")
"""Upper bounds in seconds: vLLM's own, so that its dashboards fit, and finer ones below."""


class Buckets:
    """A histogram. counts: per bucket, not cumulative; the last one is everything above."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds, self.counts, self.total = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound as Prometheus writes it, observations up to it)."""
        rows, seen = [], 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            seen += count
            rows.append(("+Inf" if bound == float("inf") else repr(bound), float(seen)))
        return rows


@dataclass(slots=True)
class Series:
    """Of one tenant on one engine, since start. finished: sequences by reason; "abort" is a client that left
    or a fault."""

    tokens: int = 0
    prompt_tokens: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    first: Buckets = field(default_factory=lambda: Buckets(FIRST_S))
    between: Buckets = field(default_factory=lambda: Buckets(TOKEN_S))
    per_token: Buckets = field(default_factory=lambda: Buckets(TOKEN_S))
    whole: Buckets = field(default_factory=lambda: Buckets(REQUEST_S))


class Tally:
    """All series, by (tenant label, engine). Tenant labels are bounded by the table they come from."""

    def __init__(self) -> None:
        self._series: dict[tuple[str, str], Series] = {}

    @property
    def series(self) -> Mapping[tuple[str, str], Series]:
        return self._series

    @property
    def tokens(self) -> int:
        return sum(one.tokens for one in self._series.values())

    def of(self, tenant: str, engine: str) -> Series:
        found = self._series.get((tenant, engine))
        if found is None:
            found = self._series[tenant, engine] = Series()
        return found


class Watch:
    """Follows one sequence. `began` is when its request came."""

    __slots__ = ("_began", "_first", "_last", "_now", "_series", "_tally", "_tenant", "tokens")

    def __init__(self, tally: Tally, tenant: str, now: Callable[[], float]) -> None:
        self._tally, self._tenant, self._now = tally, tenant, now
        self._series: Series | None = None
        self._began = self._first = self._last = now()
        self.tokens = 0

    def another(self) -> Watch:
        """For another sequence of the same request."""
        made = Watch(self._tally, self._tenant, self._now)
        made._began = self._began
        return made

    @property
    def first_s(self) -> float | None:
        """From the request to its first token."""
        return self._first - self._began if self.tokens else None

    def first(self, engine: str, prompt_tokens: int) -> None:
        """The first token has come."""
        series = self._series = self._tally.of(self._tenant, engine)
        self._first = self._last = self._now()
        series.first.observe(self._first - self._began)
        series.prompt_tokens += prompt_tokens
        series.tokens += 1
        self.tokens = 1

    def token(self) -> None:
        """Each token after the first."""
        now = self._now()
        series = self._series
        if series is not None:
            series.between.observe(now - self._last)
            series.tokens += 1
        self._last = now
        self.tokens += 1

    def ended(self, finish: str, engine: str) -> None:
        """finish: "" when it was cut short. engine: where no token came, the one that was asked."""
        series = self._series or self._tally.of(self._tenant, engine)
        why = finish or "abort"
        series.finished[why] = series.finished.get(why, 0) + 1
        if why == "abort":
            return
        series.whole.observe(self._now() - self._began)
        if self.tokens > 1:
            series.per_token.observe((self._last - self._first) / (self.tokens - 1))
