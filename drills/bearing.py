"""How much load a drill sends where its file leaves that to the service: a share of what it is declared for.

Law: pure. Never more than the file wants. What a person or the file names outright (`rate`) isn't touched.
Expectations that need more requests than the service bears in that time are left out before the drill, never
after it, and the report names them: a judge that can only say "unknown" tells nobody anything.

Why declared and not measured: what a service bears shows only in its overload, which a drill must not bring
about; and the traffic manager refuses an evacuation by the same declared figure. That the service does bear
the rate is measured before anything is broken (drills.strain).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from drills.checks import MIN_DYED
from drills.measure import MAX_GAP_S
from drills.model import Expect, Expectation, Fitted, Load, Scenario

SHARE = 0.8
"""Of what one region is declared for: the traffic manager counts ten seconds, which are never even."""
MIN_STREAMS = 10
"""Expected streams from which "none was cut" says something."""
MOST_STREAMS = 0.5
LEAST_RPS = 1.25 / MAX_GAP_S
"""With fewer, one late request is a hole in the record, and nobody can say when the last failure was."""


@dataclass(frozen=True, slots=True)
class Bearing:
    """What the rows of a world say of a service.

    rps: requests per second that the stable instances of ONE region are declared for. Any region may be left
    alone with all of the load, so the others don't count, and canaries are only asked for their weight.
    row: where that stands, for people. slower_s: seconds by which its engine starts later than an echo.
    """

    rps: float
    row: str
    slower_s: float = 0.0

    @property
    def most(self) -> float:
        """The highest rate that a drill chooses by itself, requests per second."""
        return self.rps * SHARE


def fit(scenario: Scenario, bearing: Bearing, said: Collection[str]) -> Scenario:
    """`scenario`, whose rate is what its file wants at most, as `bearing` allows it.

    said: fields of the load that a person or the file named outright; they stay.
    """
    wanted = scenario.load.rate
    load = scenario.load
    if "rate" not in said and bearing.most < wanted:
        load = replace(load, rate=bearing.most)
        if "streams" not in said:
            load = replace(load, streams=_streams(scenario, load))
    # A rate that somebody chose too low leaves its expectations in: more would have been possible.
    reachable = max(load.rate, bearing.most)
    missing = {e.kind: why for e in scenario.expectations if (why := _missing(scenario, e, reachable))}
    fitted = load != scenario.load or missing
    return replace(
        scenario,
        load=load,
        phases=replace(scenario.phases, heal_s=scenario.phases.heal_s + bearing.slower_s),
        expectations=tuple(e for e in scenario.expectations if e.kind not in missing),
        fitted=Fitted(wanted, bearing.rps, bearing.row, tuple(missing.values())) if fitted else None,
    )


def _seconds(scenario: Scenario) -> float:
    """How long the load lasts at least."""
    phases = scenario.phases
    return phases.load_s + phases.hold_s + phases.settle_s


def _streams(scenario: Scenario, load: Load) -> float:
    """The share of streams, enough of them where the drill counts those that were cut."""
    if not load.streams or scenario.limit(Expect.STREAMS_CUT) is None:
        return load.streams
    enough = MIN_STREAMS / max(1.0, load.rate * _seconds(scenario))
    return max(load.streams, round(min(MOST_STREAMS, enough), 2))


def _missing(scenario: Scenario, expectation: Expectation, rate: float) -> str:
    """Why no judge could tell at this rate; "" when one can."""
    name, count = expectation.kind.value, rate * _seconds(scenario)
    if expectation.kind is Expect.DYE_DEVIATION and count < MIN_DYED:
        return f"{name}: needs {MIN_DYED} requests, and the service is declared for {count:.0f} in that time"
    if expectation.kind is Expect.RECOVERY_S and rate < LEAST_RPS:
        return f"{name}: needs {LEAST_RPS:g} requests/s, and the service is declared for {rate:.2g}"
    return ""
