"""Dye: did the coloured traffic go where the plan in force said?

Law: pure. Only requests are counted for which the intended shares are certain: their ingress had one
applied plan from a guard time before to a guard time after, and no fault was on its way to being noticed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from drills.history import History, Mark, Request, StatusSeen
from drills.measure import GUARD_S, DyeWindow, reaction, recovery_s

Shares = Mapping[tuple[str, str], float]


@dataclass(frozen=True, slots=True)
class DyeReport:
    """Every window by itself and all of them together (`pooled`, None when nothing could be counted)."""

    windows: tuple[DyeWindow, ...] = ()
    pooled: DyeWindow | None = None
    undyed: int = 0


@dataclass(slots=True)
class _Counts:
    shares: Shares
    seen: Counter[tuple[str, str]] = field(default_factory=Counter)


def dye(history: History) -> DyeReport:
    """Deviation of the observed from the intended shares, per plan in force and over the whole drill."""
    excluded = _unsettled(history)
    plans = _plans(history)
    groups: dict[frozenset[tuple[tuple[str, str], float]], _Counts] = {}
    undyed = 0
    for request in history.requests:
        if not request.ok or any(a <= request.sent_s < b for a, b in excluded):
            continue
        if not request.region:
            undyed += 1
            continue
        shares = _in_force(plans.get(request.ingress, ()), request)
        if shares:
            key = frozenset(shares.items())
            groups.setdefault(key, _Counts(shares)).seen[request.region, request.stage] += 1
    windows = tuple(_window([counts]) for counts in groups.values())
    return DyeReport(windows, _window(list(groups.values())) if groups else None, undyed)


def _unsettled(history: History) -> list[tuple[float, float]]:
    """Spans in which a fault or its healing was not yet fully noticed."""
    spans: list[tuple[float, float]] = []
    start = history.first(Mark.INJECT)
    if start is not None:
        answer = reaction(history) if history.first(Mark.CHANGE) is None else None
        noticed = start + (answer.total_s if answer else 0.0)
        spans.append((start - GUARD_S, max(noticed, start + (recovery_s(history) or 0.0)) + GUARD_S))
    heal = history.first(Mark.HEAL)
    if heal is not None:
        healed = history.last(Mark.HEALED) or history.last(Mark.END) or heal
        spans.append((heal - GUARD_S, healed + 2 * GUARD_S))
    return spans


def _plans(history: History) -> dict[str, list[tuple[float, StatusSeen]]]:
    """Per ingress region: (from when, status), in order. A plan holds from its last ACK on."""
    plans: dict[str, list[tuple[float, StatusSeen]]] = {}
    for status in sorted(history.statuses, key=lambda s: s.at_s):
        line = plans.setdefault(status.region, [])
        if line and line[-1][1].shares == status.shares and line[-1][1].applied and status.applied:
            continue
        # The last ACK is when it came into force, if that lies between our two looks; else we know this one.
        before = line[-1][1].at_s if line else 0.0
        known = status.applied and before <= status.times.applied <= status.at_s
        line.append((status.times.applied if known else status.at_s, status))
    return plans


def _in_force(line: list[tuple[float, StatusSeen]] | tuple[()], request: Request) -> Shares | None:
    """The shares that were certain while this request was sent, or None near a change."""
    at = bisect_right([since for since, _ in line], request.sent_s) - 1
    if at < 0 or not line[at][1].applied:
        return None
    since, status = line[at]
    if request.sent_s - since < GUARD_S and at > 0:
        return None
    # A change begins when the control plane sees its cause, before the document says so.
    if at + 1 < len(line):
        then, later = line[at + 1]
        until = later.times.seen if since <= later.times.seen <= then else then
        if until - request.sent_s < GUARD_S:
            return None
    return status.shares


def _window(groups: list[_Counts]) -> DyeWindow:
    total = sum(sum(g.seen.values()) for g in groups)
    wanted: dict[str, float] = {}
    found: dict[str, int] = {}
    for group in groups:
        count = sum(group.seen.values())
        for (region, stage), share in group.shares.items():
            for name in (region, stage, f"{region}/{stage}"):
                wanted[name] = wanted.get(name, 0.0) + share * count
        for (region, stage), hits in group.seen.items():
            for name in (region, stage, f"{region}/{stage}"):
                found[name] = found.get(name, 0) + hits
    worst = max(sorted({*wanted, *found}), key=lambda n: abs(found.get(n, 0) - wanted.get(n, 0.0)))
    intended, observed = wanted.get(worst, 0.0) / total, found.get(worst, 0) / total
    return DyeWindow(total, abs(observed - intended), worst, intended, observed)
