"""The History as series for plotting: per bucket rate, failures, latency, shares.

Law: pure. Times are seconds from the injection (from the start of the load when nothing was injected).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from drills.history import History, Mark, Request
from drills.measure import percentile, reaction

WIDTH_S = 0.5


@dataclass(frozen=True, slots=True)
class Slot:
    """One bucket. p50_ms, p99_ms: latency of answered requests; None when there was none.

    regions, stages: observed shares of answered requests, adding up to 1 (empty without any).
    """

    at_s: float
    requests: int
    failed: int
    p50_ms: float | None
    p99_ms: float | None
    regions: Mapping[str, float]
    stages: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Line:
    """A vertical line. kind: one of `inject`, `detect`, `applied`, `heal`, `healed`, `change`."""

    at_s: float
    kind: str
    label: str


@dataclass(frozen=True, slots=True)
class Timeline:
    """slots in order, without holes. intended: (at_s, shares by region, shares by stage) from then on."""

    zero_s: float
    width_s: float
    slots: tuple[Slot, ...]
    lines: tuple[Line, ...]
    intended: tuple[tuple[float, Mapping[str, float], Mapping[str, float]], ...]
    fault: tuple[float, float] | None

    @property
    def regions(self) -> tuple[str, ...]:
        return tuple(
            sorted({r for s in self.slots for r in s.regions} | {r for _, m, _ in self.intended for r in m})
        )

    @property
    def stages(self) -> tuple[str, ...]:
        return tuple(
            sorted({r for s in self.slots for r in s.stages} | {r for _, _, m in self.intended for r in m})
        )


def timeline(history: History, width_s: float = WIDTH_S) -> Timeline:
    """Everything the charts show."""
    first = min((r.due_s for r in history.requests), default=0.0)
    zero = history.first(Mark.INJECT) or history.first(Mark.LOAD) or first
    groups: dict[int, list[Request]] = {}
    for request in history.requests:
        groups.setdefault(math.floor((request.due_s - zero) / width_s), []).append(request)
    numbers = range(min(groups), max(groups) + 1) if groups else range(0)
    slots = tuple(_slot(n * width_s, groups.get(n, [])) for n in numbers)
    inject, heal = history.first(Mark.INJECT), history.first(Mark.HEAL)
    end = heal or history.last(Mark.END)
    fault = (inject - zero, end - zero) if inject is not None and end is not None else None
    return Timeline(zero, width_s, slots, _lines(history, zero), _intended(history, zero), fault)


def _slot(at_s: float, requests: list[Request]) -> Slot:
    good = [r for r in requests if r.ok]
    latencies = [r.latency_s * 1000 for r in good if not r.stream]
    return Slot(
        round(at_s, 6),
        len(requests),
        len(requests) - len(good),
        percentile(latencies, 0.5),
        percentile(latencies, 0.99),
        _shares(r.region for r in good if r.region),
        _shares(r.stage for r in good if r.stage),
    )


def _shares(names: Iterable[str]) -> dict[str, float]:
    counts = Counter(names)
    total = sum(counts.values())
    return {name: count / total for name, count in sorted(counts.items())}


def _lines(history: History, zero: float) -> tuple[Line, ...]:
    lines = []
    marks = (
        (Mark.INJECT, "inject", "inject"),
        (Mark.HEAL, "heal", "heal"),
        (Mark.BACK, "healed", "healed"),
        (Mark.CHANGE, "change", "weight change"),
    )
    for mark, kind, label in marks:
        at = history.first(mark)
        if at is not None:
            lines.append(Line(at - zero, kind, label))
    answer = reaction(history)
    if answer is not None:
        lines.append(Line(answer.start_s + answer.detect_s - zero, "detect", "detected"))
        lines.append(Line(answer.start_s + answer.total_s - zero, "applied", "applied"))
    return tuple(sorted(lines, key=lambda line: line.at_s))


def _intended(
    history: History, zero: float
) -> tuple[tuple[float, Mapping[str, float], Mapping[str, float]], ...]:
    """The plan of the first region that is not the target: all regions plan the same."""
    names = sorted({s.region for s in history.statuses}, key=lambda n: (n == history.target, n))
    steps: list[tuple[float, Mapping[str, float], Mapping[str, float]]] = []
    for status in history.statuses:
        if not names or status.region != names[0] or not status.applied or not status.shares:
            continue
        regions: dict[str, float] = {}
        stages: dict[str, float] = {}
        for (region, stage), share in status.shares.items():
            regions[region] = regions.get(region, 0.0) + share
            stages[stage] = stages.get(stage, 0.0) + share
        if not steps or (steps[-1][1], steps[-1][2]) != (regions, stages):
            steps.append(((status.times.applied or status.at_s) - zero, regions, stages))
    return tuple(steps)
