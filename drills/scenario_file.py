"""Scenario files: the strict YAML schema, and the parameters a person may change from outside.

Law: reads the one file it is given; everything that leaves is a frozen drills.model.Scenario with no
parameter left open. Errors name file, line and field (regions.yamlfile) or the parameter.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from drills.bearing import Bearing, fit
from drills.model import (
    USUAL_RPS,
    Action,
    Expect,
    Expectation,
    Ingresses,
    Load,
    Phases,
    Probe,
    ProbeKind,
    Scenario,
    Tolerance,
)
from drills.scenario_schema import ActionRow, LoadRow, PhasesRow, ScenarioFile, contradictions
from regions.cli.errors import UsageError
from regions.yamlfile import DataFileError, StrictModel, read_marked

FOLDER = Path(__file__).parent / "scenarios"


@dataclass(frozen=True, slots=True)
class Draft:
    """A scenario read but not yet decided: the target may be `primary`, the mode still open."""

    name: str
    path: Path
    text: str
    file: ScenarioFile

    @property
    def modes(self) -> tuple[str, ...]:
        return tuple(self.file.modes)


PARAMETERS: Mapping[str, str] = {
    "mode": "which way to break it, where the drill has several",
    "region": "the region the drill is about (also --region)",
    "rate": "requests per second, whatever the service is declared for (also --rate)",
    "duration": "seconds the fault stays (also --duration)",
    "load": "seconds of load before the fault",
    "settle": "seconds of load after the healing",
    "streams": "share of requests that stream",
    "sessions": "share of requests that carry a session key",
    "tokens": "tokens of a plain request",
    "stream-tokens": "tokens of a stream",
    "timeout": "seconds after which a request without its whole answer has failed",
    "service": "the service that is called",
}
"""What `--set` takes, for help texts and errors."""


def names(folder: Path = FOLDER) -> tuple[str, ...]:
    """Names of the shipped scenarios, sorted."""
    return tuple(sorted(p.stem for p in folder.glob("*.yaml")))


def read(name: str, folder: Path = FOLDER) -> Draft:
    """By shipped name, or by the path of a `.yaml` file. Raises UsageError (DataFileError: its content)."""
    path = Path(name) if name.endswith(".yaml") else folder / f"{name}.yaml"
    if not name.endswith(".yaml") and name not in names(folder):
        raise UsageError(
            f"drill {name!r}",
            f"there is none of that name; known are {', '.join(names(folder))}",
            "see `weir drill list`, or give the path of a .yaml file",
        )
    marked = read_marked(path, ScenarioFile)
    problems = [marked.problem(place, why) for place, why in contradictions(marked.value)]
    if problems:
        raise DataFileError(problems)
    return Draft(path.stem, path, path.read_text(encoding="utf-8"), marked.value)


def decide(
    draft: Draft, settings: Mapping[str, str], *, region: str, bearing: Bearing | None = None
) -> Scenario:
    """The scenario with every parameter set; `region`: the target's name. UsageError: a bad parameter.

    bearing: what the service is declared for; None: not known, the file has what it wants.
    """
    file = draft.file
    unknown = sorted(set(settings) - set(PARAMETERS))
    if unknown:
        raise UsageError(f"--set {unknown[0]}", "no such parameter", f"known are {', '.join(PARAMETERS)}")
    mode = _mode(draft, settings.get("mode", ""))
    actions = _actions(file.actions)
    if mode:
        actions = (Action(file.modes[mode].do), *actions)
    limits = file.expect.model_dump(exclude_none=True)
    scenario = _with_numbers(
        Scenario(
            name=draft.name,
            title=file.title,
            description=file.description,
            service=settings.get("service", file.service),
            target=region,
            steady_state=tuple(
                Probe(ProbeKind(p.probe), Tolerance(p.tolerance.min, p.tolerance.max))
                for p in file.steady_state
            ),
            load=_load(file.load),
            actions=actions,
            expectations=tuple(
                Expectation(Expect(k), v[mode] if isinstance(v, dict) else v) for k, v in limits.items()
            ),
            phases=Phases(**file.phases.model_dump()),
            mode=mode,
            after_heal=_actions(file.after_heal),
            healing=file.healing,
            text=draft.text,
        ),
        settings,
    )
    if bearing is None:
        return scenario
    said = {field for name, field in _LOAD.items() if name in settings}
    return fit(scenario, bearing, said | ({"rate"} if file.load.rate is not None else set()))


def _load(row: LoadRow) -> Load:
    wanted = next((r for r in (row.rate, row.rate_up_to) if r is not None), USUAL_RPS)
    fields = row.model_dump(exclude={"rate", "rate_up_to"})
    return Load(**fields | {"rate": wanted, "ingresses": Ingresses(row.ingresses)})


def _actions(rows: Sequence[ActionRow]) -> tuple[Action, ...]:
    return tuple(Action(row.do, row.at_s, MappingProxyType(row.params)) for row in rows)


def _mode(draft: Draft, asked: str) -> str:
    if asked and asked not in draft.modes:
        known = f"known are {', '.join(draft.modes)}" if draft.modes else "this drill has no modes"
        raise UsageError(f"--set mode={asked}", f"not a mode of {draft.name}", known)
    return asked or next(iter(draft.modes), "")


_LOAD = {
    "rate": "rate",
    "streams": "streams",
    "sessions": "sessions",
    "tokens": "tokens",
    "stream-tokens": "stream_tokens",
    "timeout": "timeout_s",
}
_PHASES = {"duration": "hold_s", "load": "load_s", "settle": "settle_s"}


def _with_numbers(scenario: Scenario, settings: Mapping[str, str]) -> Scenario:
    """Numbers from outside pass the same bounds as those of the file."""
    load = {field: _number(k, settings[k], LoadRow, field) for k, field in _LOAD.items() if k in settings}
    phases = {f: _number(k, settings[k], PhasesRow, f) for k, f in _PHASES.items() if k in settings}
    changed = replace(
        scenario,
        load=replace(scenario.load, **load),
        phases=replace(scenario.phases, **phases),
    )
    last = max((a.at_s for a in changed.actions), default=0.0)
    if last > changed.phases.hold_s:
        raise UsageError(
            "duration",
            f"{changed.phases.hold_s:g} s is too short: an action comes at {last:g} s",
            "make it longer",
        )
    return changed


def _number(name: str, text: str, model: type[StrictModel], field: str) -> Any:
    """The text as a number that the field of the file would take too."""
    if not re.fullmatch(r"[0-9]+(\.[0-9]+)?", text):
        raise UsageError(f"--set {name}={text}", "a plain number is needed", f"for instance --set {name}=10")
    try:
        return getattr(model.model_validate({field: float(text) if "." in text else int(text)}), field)
    except ValidationError as error:
        why = error.errors(include_url=False)[0]["msg"].replace("Input should be", "must be")
        raise UsageError(f"--set {name}={text}", why, f"for instance --set {name}=10") from error
