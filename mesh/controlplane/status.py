"""The status document of one service in one region: what is applied, what was refused, what is observed.

Law: pure. Time comes in as an argument. The document's keys are a public interface (docs/architecture.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from mesh.model import CANARY, Refusal, TrafficPlan

WINDOW_S = 10.0
"""Seconds of load reports that an observed share is made of."""


@dataclass(frozen=True, slots=True)
class ProxyView:
    """One ingress stream: which route version it has acknowledged, and why it refused, if it did."""

    proxy: str
    acked: str
    nack: str = ""


@dataclass(frozen=True, slots=True)
class Times:
    """Unix seconds of the latest change: noticed, decided, handed to the streams, acknowledged by all."""

    seen: float = 0.0
    decided: float = 0.0
    pushed: float = 0.0
    applied: float = 0.0


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of one LRS interval that ended at `at` (monotonic seconds) and was so many seconds long."""

    at: float
    requests: Mapping[tuple[str, str], int]
    seconds: float


@dataclass(frozen=True, slots=True)
class Observed:
    """Load reports of the last WINDOW_S seconds, oldest first; emptied when the plan changes."""

    loads: tuple[Load, ...] = ()
    since: float = 0.0

    def add(self, load: Load) -> Observed:
        """With one more report; a report that began before the plan changed is mixed water and dropped."""
        if load.at - load.seconds < self.since:
            return self
        kept = tuple(item for item in self.loads if item.at > load.at - WINDOW_S)
        return replace(self, loads=(*kept, load))

    def shares(self, now: float) -> dict[str, Any]:
        """Observed shares; canary None and no regions when nothing flowed."""
        total: dict[tuple[str, str], int] = {}
        for load in self.loads:
            if load.at > now - WINDOW_S:
                for owner, count in load.requests.items():
                    total[owner] = total.get(owner, 0) + count
        requests = sum(total.values())
        regions: dict[str, int] = {}
        for (region, _), count in total.items():
            regions[region] = regions.get(region, 0) + count
        canary = sum(count for (_, stage), count in total.items() if stage == CANARY)
        return {
            "canary": round(canary / requests, 4) if requests else None,
            "regions": {r: round(n / requests, 4) for r, n in sorted(regions.items())} if requests else {},
            "stages": {f"{r}/{s}": n for (r, s), n in sorted(total.items())},
            "requests": requests,
            "window_s": round(min(WINDOW_S, max(0.0, now - self.since)), 3),
        }


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the current plan of a service has come."""

    version: str = ""
    times: Times = field(default_factory=Times)
    acknowledged: int = 0
    connected: int = 0
    nacks: tuple[tuple[str, str], ...] = ()
    behind: tuple[str, ...] = ()
    """Connected proxies that have not acknowledged this version."""

    @property
    def applied(self) -> bool:
        return self.connected > 0 and self.acknowledged == self.connected and not self.nacks


def progress(last: Progress, version: str, views: Sequence[ProxyView], times: Times, now: float) -> Progress:
    """The progress after looking at the streams; `times.applied` is set once, by the last acknowledgement."""
    done = sum(view.acked == version for view in views)
    nacks = tuple((view.proxy, view.nack) for view in views if view.nack)
    behind = tuple(sorted({view.proxy for view in views if view.acked != version}))
    fresh = times if version != last.version else last.times
    result = Progress(version, fresh, done, len(views), nacks, behind)
    if result.applied and not fresh.applied:
        return replace(result, times=replace(fresh, applied=now))
    return result


def document(
    plan: TrafficPlan,
    region: str,
    step: Progress,
    observed: Mapping[str, Any],
    path: Mapping[str, str] = MappingProxyType({}),
    strangers: Sequence[Refusal] = (),
) -> dict[str, Any]:
    """The JSON body of status/traffic/<service>/<region>."""
    refusals = [*plan.refusals, *strangers]
    return {
        "schema_version": 1,
        "service": plan.service,
        "region": region,
        "canary_weight": {"value": plan.canary_weight, "key": plan.canary_key},
        "regions": {r: round(s, 6) for r, s in sorted(plan.region_shares.items())},
        "evacuated": list(plan.evacuated),
        "slices": [[s.region, s.stage, s.weight] for s in plan.slices],
        "layout": [[region, stage, weight] for (region, stage), weight in plan.layout],
        "reason": plan.reason,
        "kv_index": plan.kv_index,
        "version": step.version,
        "acknowledged": step.acknowledged,
        "connected": step.connected,
        "behind": list(step.behind),
        "applied": step.applied,
        "refusals": [{"key": r.key, "reason": r.reason, "kv_index": r.kv_index} for r in refusals],
        "nacks": [{"proxy": proxy, "reason": reason} for proxy, reason in step.nacks],
        "path": dict(sorted(path.items())),
        "observed": dict(observed),
        "times": {
            "seen": step.times.seen,
            "decided": step.times.decided,
            "pushed": step.times.pushed,
            "applied": step.times.applied,
        },
    }


def layout_of(body: object) -> tuple[tuple[tuple[str, str], int], ...]:
    """The layout that an earlier document carried, () when it carried none that can be read."""
    try:
        rows = body["layout"]  # type: ignore[index]
        return tuple(((str(region), str(stage)), int(weight)) for region, stage, weight in rows)
    except (TypeError, KeyError, ValueError):
        return ()
