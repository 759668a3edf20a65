"""What a drill is, as frozen values: the words are Chaos Toolkit's (probe, tolerance, action, steady state).

Law: pure. No I/O, no clock, no chance. Times in a scenario are seconds from the injection; rates are
requests per second; shares are fractions in [0, 1].
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType


class Verdict(StrEnum):
    """A drill's answer. UNKNOWN is no pass: the evidence is missing."""

    PASS = "pass"  # noqa: S105 - a verdict, not a password
    UNKNOWN = "unknown"
    FAIL = "fail"


_BADNESS = {Verdict.PASS: 0, Verdict.UNKNOWN: 1, Verdict.FAIL: 2}


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The worst of them; of none at all, UNKNOWN: a drill that judged nothing proved nothing."""
    return max(verdicts, key=_BADNESS.__getitem__, default=Verdict.UNKNOWN)


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Closed bounds a measured value must lie in. None means open on that side."""

    min: float | None = None
    max: float | None = None

    def holds(self, value: float) -> bool:
        return (self.min is None or value >= self.min) and (self.max is None or value <= self.max)

    def __str__(self) -> str:
        parts = [f"≥ {self.min:g}"] if self.min is not None else []
        parts += [f"≤ {self.max:g}"] if self.max is not None else []
        return " and ".join(parts)


class ProbeKind(StrEnum):
    """What the steady state is measured by. The last two need load and are measured under it."""

    REGIONS_READY = "regions-ready"
    TRAFFIC_APPLIED = "traffic-applied"
    SUCCESS_RATE = "success-rate"
    DYE_DEVIATION = "dye-deviation"


UNDER_LOAD = (ProbeKind.SUCCESS_RATE, ProbeKind.DYE_DEVIATION)


@dataclass(frozen=True, slots=True)
class Probe:
    """One measurement of the steady state and what it must be (1.0 = yes for yes-or-no probes)."""

    kind: ProbeKind
    tolerance: Tolerance = Tolerance(min=1.0)


USUAL_RPS = 200.0
"""Requests per second of a drill whose file says nothing."""


class Ingresses(StrEnum):
    """Which ingress gateways the load goes to: all, those of regions that live on, or the target's alone."""

    ALL = "all"
    SURVIVING = "surviving"
    TARGET = "target"


@dataclass(frozen=True, slots=True)
class Load:
    """Open-loop load: request n is due at n/rate whether or not earlier ones have been answered.

    rate: requests per second in all. streams, sessions: shares of requests that stream their tokens /
    carry a session key. tokens, stream_tokens: max_tokens of a plain request and of a stream.
    timeout_s: a request with no complete answer by then has failed.
    """

    rate: float = USUAL_RPS
    streams: float = 0.1
    sessions: float = 0.5
    tokens: int = 4
    stream_tokens: int = 12
    timeout_s: float = 15.0
    ingresses: Ingresses = Ingresses.ALL


@dataclass(frozen=True, slots=True)
class Action:
    """One thing done to the world, `at_s` after the injection began. `do` names a row of the fault table."""

    do: str
    at_s: float = 0.0
    params: Mapping[str, str | float] = field(default_factory=lambda: MappingProxyType({}))


class Expect(StrEnum):
    """What the recorded history is judged by; each is a row of drills.checks.CHECKS."""

    SUCCESS_RATE = "success_rate"
    DYE_DEVIATION = "dye_deviation"
    RECOVERY_S = "recovery_s"
    FAILED = "failed"
    STREAMS_CUT = "streams_cut"
    NO_NEW_REQUESTS_AFTER_S = "no_new_requests_after_s"
    NEXT_WEIGHT_CHANGE_S = "next_weight_change_s"
    MTTR_S = "mttr_s"


AT_LEAST = (Expect.SUCCESS_RATE,)
"""Expectations whose limit is a minimum; for all others it is a maximum."""


@dataclass(frozen=True, slots=True)
class Expectation:
    kind: Expect
    limit: float

    @property
    def wanted(self) -> str:
        """The limit as a person reads it."""
        if self.kind in (Expect.SUCCESS_RATE, Expect.DYE_DEVIATION):
            shown = f"{self.limit * 100:.6g} %"
        elif self.kind in (Expect.FAILED, Expect.STREAMS_CUT):
            shown = f"{self.limit:.0f}"
        else:
            shown = f"{self.limit:g} s"
        return ("≥ " if self.kind in AT_LEAST else "≤ ") + shown


@dataclass(frozen=True, slots=True)
class Phases:
    """How long each part may take or lasts, seconds.

    gate_s: longest wait for the steady state before load. load_s: load before the injection.
    hold_s: how long the fault stays. heal_s: longest wait for the healing to be proven.
    settle_s: load after the healing.
    """

    gate_s: float = 30.0
    load_s: float = 8.0
    hold_s: float = 15.0
    heal_s: float = 90.0
    settle_s: float = 5.0


@dataclass(frozen=True, slots=True)
class Fitted:
    """That a drill is less than its file wants, because the service can't bear that (drills.bearing).

    wanted: requests per second by the file. declared: what one region is declared for, in `row`.
    left_out: expectations that can't be judged by so few requests, each with the reason.
    """

    wanted: float
    declared: float
    row: str
    left_out: tuple[str, ...] = ()

    @property
    def told(self) -> tuple[str, ...]:
        """In sentences, before the drill and in its report."""
        bound = f"up to {self.wanted:g} wanted; one region is declared for {self.declared:g} ({self.row})"
        return (bound, *(f"left out: {each}" for each in self.left_out))


@dataclass(frozen=True, slots=True)
class Scenario:
    """One drill, every parameter decided.

    target: the region the drill is about. mode: which of the scenario's ways to break it was chosen
    ("" when there is one way only). after_heal: actions whose `at_s` counts from the proven healing.
    healing: what undoes the actions, in words, shown before the drill begins.
    text: the file it came from, word for word, for the report. fitted: None when it is as the file wants it.
    """

    name: str
    title: str
    description: str
    service: str
    target: str
    steady_state: tuple[Probe, ...]
    load: Load
    actions: tuple[Action, ...]
    expectations: tuple[Expectation, ...]
    phases: Phases = field(default_factory=Phases)
    mode: str = ""
    after_heal: tuple[Action, ...] = ()
    healing: str = ""
    text: str = field(default="", compare=False)
    fitted: Fitted | None = None

    def limit(self, kind: Expect) -> float | None:
        return next((e.limit for e in self.expectations if e.kind is kind), None)


@dataclass(frozen=True, slots=True)
class Judgement:
    """One judged expectation. `got`: in its unit (shares as fractions), None = not measured."""

    what: str
    wanted: str
    got: float | None
    verdict: Verdict
    reason: str
