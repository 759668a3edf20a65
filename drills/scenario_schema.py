"""The schema of a scenario file, and what a schema of types cannot say.

Law: shapes and bounds only; reads no file. `contradictions` returns places and reasons, it never raises.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from drills.model import Ingresses, ProbeKind
from regions.yamlfile import StrictModel

Seconds = Annotated[float, Field(ge=0, le=3600)]
Share = Annotated[float, Field(ge=0, le=1)]
ByMode = float | dict[str, float]


class ToleranceRow(StrictModel):
    min: float | None = None
    max: float | None = None


class ProbeRow(StrictModel):
    probe: str
    tolerance: ToleranceRow = ToleranceRow(min=1.0)


Rate = Annotated[float, Field(gt=0, le=5000)]


class LoadRow(StrictModel):
    """rate: exactly this. rate_up_to: less where the service is declared for less (drills.bearing)."""

    rate: Rate | None = None
    rate_up_to: Rate | None = None
    streams: Share = 0.1
    sessions: Share = 0.5
    tokens: Annotated[int, Field(ge=1, le=10_000)] = 4
    stream_tokens: Annotated[int, Field(ge=1, le=10_000)] = 12
    timeout_s: Annotated[float, Field(gt=0, le=600)] = 15.0
    ingresses: str = Ingresses.ALL.value


class ActionRow(StrictModel):
    do: str
    at_s: Seconds = 0.0
    params: dict[str, str | float] = Field(default_factory=dict)


class PhasesRow(StrictModel):
    gate_s: Seconds = 30.0
    load_s: Seconds = 8.0
    hold_s: Seconds = 15.0
    heal_s: Seconds = 90.0
    settle_s: Seconds = 5.0


class ModeRow(StrictModel):
    do: str
    help: str


class ExpectRows(StrictModel):
    """One field per expectation; a number, or one number per mode."""

    success_rate: ByMode | None = None
    dye_deviation: ByMode | None = None
    recovery_s: ByMode | None = None
    failed: ByMode | None = None
    streams_cut: ByMode | None = None
    no_new_requests_after_s: ByMode | None = None
    next_weight_change_s: ByMode | None = None
    mttr_s: ByMode | None = None


class ScenarioFile(StrictModel):
    """A file of drills/scenarios/."""

    title: str
    description: str
    service: str = "chat"
    target: str = "primary"
    modes: dict[str, ModeRow] = Field(default_factory=dict)
    steady_state: list[ProbeRow] = Field(min_length=1)
    load: LoadRow = LoadRow()
    actions: list[ActionRow] = Field(default_factory=list)
    after_heal: list[ActionRow] = Field(default_factory=list)
    expect: ExpectRows
    healing: str
    phases: PhasesRow = PhasesRow()


def contradictions(file: ScenarioFile) -> list[tuple[tuple[str | int, ...], str]]:
    """What a schema of types can't say."""
    wrong: list[tuple[tuple[str | int, ...], str]] = []
    kinds = [k.value for k in ProbeKind]
    for n, row in enumerate(file.steady_state):
        if row.probe not in kinds:
            wrong.append((("steady_state", n, "probe"), f"unknown probe; known are {', '.join(kinds)}"))
        if row.tolerance.min is None and row.tolerance.max is None:
            wrong.append((("steady_state", n, "tolerance"), "bounds nothing: give min, max or both"))
    ingresses = [i.value for i in Ingresses]
    if file.load.ingresses not in ingresses:
        wrong.append((("load", "ingresses"), f"must be one of {', '.join(ingresses)}"))
    if file.load.rate is not None and file.load.rate_up_to is not None:
        wrong.append((("load", "rate_up_to"), "says the rate a second time: give rate or rate_up_to"))
    if not file.modes and not file.actions:
        wrong.append((("actions",), "a drill without modes and without actions breaks nothing"))
    limits = file.expect.model_dump(exclude_none=True)
    if not limits:
        wrong.append((("expect",), "a drill that expects nothing can't fail"))
    for kind, limit in limits.items():
        if isinstance(limit, dict) and set(limit) != set(file.modes):
            wrong.append((("expect", kind), f"one number for each mode is needed: {', '.join(file.modes)}"))
    for field, rows in (("actions", file.actions), ("after_heal", file.after_heal)):
        late = [n for n, row in enumerate(rows) if field == "actions" and row.at_s > file.phases.hold_s]
        wrong += [((field, n, "at_s"), "later than phases.hold_s, so it would never happen") for n in late]
    return wrong
