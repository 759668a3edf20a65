"""What was recorded during a drill, frozen. The runner only writes it; drills.checks only reads it.

Law: pure. All times are unix seconds of this machine's clock (one machine, one clock: load generator,
runner and control planes agree). A History is never changed, only replaced.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, slots=True)
class Request:
    """One request of the load, as its client saw it.

    due_s: when it was to be sent (open loop); latency counts from there, so a stalled generator can't
    hide a stalled mesh. sent_s: when it really went out. ok: complete and right. cut: a stream that began
    and did not end properly (never ok). ingress: region whose gateway was asked. region, stage: who
    answered, from `x-envoy-upstream-metadata`; "" when nobody did. attempts: by Envoy's count, 0 = not told.
    """

    due_s: float
    sent_s: float
    latency_s: float
    ok: bool
    status: int
    ingress: str
    region: str = ""
    stage: str = ""
    session: bool = False
    stream: bool = False
    cut: bool = False
    attempts: int = 0
    error: str = ""


class Mark(StrEnum):
    """The moments a drill is told by. Values are what the report prints."""

    LOAD = "load"
    INJECT = "inject"
    INJECTED = "injected"
    ACTION = "action"
    HEAL = "heal"
    HEALED = "healed"
    BACK = "back"
    CHANGE = "weight change"
    CHANGED = "weight change applied"
    INTERRUPTED = "interrupted"
    END = "end"


@dataclass(frozen=True, slots=True)
class Event:
    """Something the runner did or saw. `what` is for people."""

    at_s: float
    mark: Mark
    what: str = ""
    region: str = ""


@dataclass(frozen=True, slots=True)
class Times:
    """When a control plane saw a cause, decided, pushed, and had the last ACK. 0 = not (yet)."""

    seen: float = 0.0
    decided: float = 0.0
    pushed: float = 0.0
    applied: float = 0.0


@dataclass(frozen=True, slots=True)
class StatusSeen:
    """A status document of one region, as it stood from `at_s` on.

    shares: intended share of every (region, stage), adding up to 1.
    """

    at_s: float
    region: str
    shares: Mapping[tuple[str, str], float]
    applied: bool
    version: str = ""
    evacuated: tuple[str, ...] = ()
    path: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    times: Times = field(default_factory=Times)
    canary: float | None = None

    @staticmethod
    def from_document(document: Mapping[str, Any], at_s: float) -> StatusSeen:
        """From the JSON of docs/architecture.md. Missing parts are "not known"; ValueError on nonsense."""
        try:
            slices = [(str(r), str(s), float(w)) for r, s, w in document.get("slices") or ()]
            times = document.get("times") or {}
            canary = (document.get("canary_weight") or {}).get("value")
            return StatusSeen(
                at_s=at_s,
                region=str(document["region"]),
                shares=_shares(slices),
                applied=bool(document.get("applied")),
                version=str(document.get("version") or ""),
                evacuated=tuple(str(r) for r in document.get("evacuated") or ()),
                path=MappingProxyType({str(k): str(v) for k, v in (document.get("path") or {}).items()}),
                times=Times(*(float(times.get(k) or 0.0) for k in ("seen", "decided", "pushed", "applied"))),
                canary=None if canary is None else float(canary),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"status document is not as docs/architecture.md says: {error!r}") from error


def _shares(slices: Iterable[tuple[str, str, float]]) -> Mapping[tuple[str, str], float]:
    """Shares per (region, stage): a layout may name the same pair in several places."""
    weights: dict[tuple[str, str], float] = {}
    for region, stage, weight in slices:
        weights[region, stage] = weights.get((region, stage), 0.0) + weight
    total = sum(weights.values())
    return MappingProxyType({k: w / total for k, w in weights.items()} if total > 0 else {})


@dataclass(frozen=True, slots=True)
class History:
    """The whole record of one drill, in order of time.

    target: the region the drill was about. retried_by_stat: retries the ingress gateways counted during
    the drill (Envoy's upstream_rq_retry), None when they could not be read.
    """

    target: str
    requests: tuple[Request, ...] = ()
    events: tuple[Event, ...] = ()
    statuses: tuple[StatusSeen, ...] = ()
    retried_by_stat: int | None = None

    def first(self, mark: Mark) -> float | None:
        """When this mark stands for the first time."""
        return next((e.at_s for e in self.events if e.mark is mark), None)

    def last(self, mark: Mark) -> float | None:
        return next((e.at_s for e in reversed(self.events) if e.mark is mark), None)
