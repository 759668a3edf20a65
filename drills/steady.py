"""The steady state: measured before anything is broken, and compared with after the healing.

Law: reads only. A probe that can't be measured does not hold.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from drills.doors import Doors
from drills.dye import dye
from drills.history import History, StatusSeen
from drills.measure import success_rate
from drills.model import UNDER_LOAD, Probe, ProbeKind, Scenario
from drills.outcome import Finding


async def before_load(scenario: Scenario, doors: Doors) -> tuple[Finding, ...]:
    """The probes that need no load, each measured once."""
    found = []
    for probe in scenario.steady_state:
        if probe.kind not in UNDER_LOAD:
            why = await _WITHOUT_LOAD[probe.kind](scenario, doors)
            found.append(_finding(probe, 0.0 if why else 1.0, why or "yes"))
    return tuple(found)


def under_load(scenario: Scenario, history: History) -> tuple[Finding, ...]:
    """The probes that need load, from what was recorded so far."""
    found = []
    for probe in scenario.steady_state:
        if probe.kind is ProbeKind.SUCCESS_RATE:
            rate = success_rate(history.requests)
            lost = sum(not r.ok for r in history.requests)
            found.append(_finding(probe, rate, f"{lost} of {len(history.requests)} requests failed"))
        elif probe.kind is ProbeKind.DYE_DEVIATION:
            pooled = dye(history).pooled
            value = pooled.deviation if pooled else None
            found.append(
                _finding(probe, value, f"{value:.4f}" if value is not None else "nothing to measure")
            )
    return tuple(found)


def _finding(probe: Probe, value: float | None, detail: str) -> Finding:
    held = value is not None and probe.tolerance.holds(value)
    return Finding(probe.kind.value, value, held, detail if held else f"{detail} (wanted {probe.tolerance})")


async def _regions_ready(scenario: Scenario, doors: Doors) -> str:
    answers = await asyncio.gather(*(doors.regions.not_ready(name) for name in doors.names))
    bad = [f"{name}: {why}" for name, why in zip(doors.names, answers, strict=True) if why]
    return "; ".join(bad)


async def _traffic_applied(scenario: Scenario, doors: Doors) -> str:
    documents = await doors.statuses.documents(scenario.service)
    for name in doors.names:
        if name not in documents:
            return f"{name} publishes no status"
        if not documents[name].get("applied"):
            return f"{name} has not applied its plan"
        if documents[name].get("evacuated"):
            return f"{documents[name]['evacuated'][0]} is evacuated"
    return ""


_WITHOUT_LOAD: Mapping[ProbeKind, Callable[[Scenario, Doors], Awaitable[str]]] = {
    ProbeKind.REGIONS_READY: _regions_ready,
    ProbeKind.TRAFFIC_APPLIED: _traffic_applied,
}


async def same_plan(before: Mapping[str, StatusSeen], now: Mapping[str, StatusSeen], doors: Doors) -> str:
    """ "" when every region is ready and its applied plan is the one it had before, else the difference."""
    for name in doors.names:
        if why := await doors.regions.not_ready(name):
            return f"{name}: {why}"
    for name, old in before.items():
        new = now.get(name)
        if new is None or not new.applied:
            return f"{name} has not applied its plan"
        if new.canary != old.canary:
            return f"{name} has canary weight {new.canary} instead of {old.canary}"
        if new.shares != old.shares:
            return f"{name} still plans other shares than before"
    return ""
