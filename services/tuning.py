"""`--set NAME=VALUE`: every number of pool, scheduler and answers that has no option of its own.

Law: pure. What may be set are the fields of the frozen settings themselves, their defaults are the defaults;
types are checked here, bounds by the settings, and what is unknown is refused with the nearest known name.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from difflib import get_close_matches
from typing import Any, TypeVar

from regions.cli.errors import UsageError
from services.answer_settings import AnswerSettings
from services.batching.model import BatchingSettings
from services.pool.parts import PoolSettings

T = TypeVar("T", PoolSettings, BatchingSettings, AnswerSettings)

SECTIONS: dict[str, PoolSettings | BatchingSettings | AnswerSettings] = {
    "pool": PoolSettings(),
    "scheduler": BatchingSettings(),
    "answers": AnswerSettings(),
}
ELSEWHERE = {"pool.drain": "--drain-deadline-s and --drain-settle-s", "scheduler.classes": "--tenants"}
"""What has options of its own that say more than a number."""
_UNITS = {"_s": "seconds", "_ms": "milliseconds", "_factor": "factor"}


@dataclass(frozen=True, slots=True)
class Knob:
    """name: as --set takes it. default: a number."""

    name: str
    default: int | float
    unit: str


def knobs() -> tuple[Knob, ...]:
    """All there are, by section, in the order of their fields."""
    return tuple(knob for name, settings in SECTIONS.items() for knob in _of(name, settings))


def _of(prefix: str, settings: Any) -> Iterator[Knob]:
    for field in fields(settings):
        name, value = f"{prefix}.{field.name}", getattr(settings, field.name)
        if name in ELSEWHERE:
            continue
        if is_dataclass(value):
            yield from _of(name, value)
        else:
            yield Knob(name, value, _unit(field.name, value))


def _unit(name: str, value: int | float) -> str:
    for end, unit in _UNITS.items():
        if name.endswith(end):
            return unit
    return "count" if isinstance(value, int) else "number" if value > 1 else "share, 0 to 1"


def tuned(section: str, settings: T, told: Sequence[str]) -> T:
    """`settings` with those of `told` (NAME=VALUE) that are of this section; the last of a name wins.

    Raises UsageError, also for a name of no section.
    """
    known = {knob.name: knob for knob in knobs()}
    for text in told:
        name, sign, value = text.partition("=")
        if not sign or name not in known:
            raise _unknown(text, name, list(known))
        head, _, path = name.partition(".")
        if head != section:
            continue
        number = _number(text, value, known[name])
        try:
            settings = _with(settings, path.split("."), number)
        except ValueError as error:
            raise UsageError(f"--set {text}", str(error), _default(known[name])) from None
    return settings


def _with(settings: Any, path: list[str], value: int | float) -> Any:
    name, *rest = path
    inner: Any = _with(getattr(settings, name), rest, value) if rest else value
    return replace(settings, **{name: inner})


def _number(text: str, value: str, knob: Knob) -> int | float:
    try:
        number = type(knob.default)(value)
    except ValueError:
        kind = "a whole number" if isinstance(knob.default, int) else "a number"
        raise UsageError(f"--set {text}", f"not {kind}", _default(knob)) from None
    if not math.isfinite(number) or number < 0:
        raise UsageError(f"--set {text}", "out of range: a finite number, 0 or more", _default(knob))
    return number


def _default(knob: Knob) -> str:
    return f"the default is {knob.default:g} ({knob.unit}); weir executor --settings lists all"


def _unknown(text: str, name: str, known: list[str]) -> UsageError:
    for place, instead in ELSEWHERE.items():
        if name == place or name.startswith(place + "."):
            return UsageError(f"--set {text}", "has an option of its own", f"use {instead}")
    # Also by the last word alone: few know which section a name is of.
    last = {k.rpartition(".")[2]: k for k in known}
    close = get_close_matches(name, known, 1, 0.0)
    close = [last[w] for w in get_close_matches(name.rpartition(".")[2], list(last), 1, 0.75)] or close
    why = "no such setting" if "=" in text else "not NAME=VALUE"
    return UsageError(f"--set {text}", why, f"nearest: {close[0]}; weir executor --settings lists all")
