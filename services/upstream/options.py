"""Engine options from text into a frozen dataclass.

Law: pure; knows no engine. The kind of an option is that of its field: str, int, float or bool.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from regions.cli.errors import UsageError

T = TypeVar("T")
Limits = Mapping[str, tuple[float, float]]
_TRUTH = {"true": True, "on": True, "1": True, "false": False, "off": False, "0": False}


def read(cls: type[T], engine: str, options: Mapping[str, str], limits: Limits) -> T:
    """An instance of `cls`. Raises UsageError naming the option."""
    kinds = {f.name: str(f.type) for f in fields(cls)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for name, text in options.items():
        if name not in kinds:
            known = ", ".join(sorted(kinds))
            raise UsageError(f"engine option {name!r}", f"unknown to {engine}", f"known: {known}")
        values[name] = _value(name, text, kinds[name], limits.get(name, (0, 1e12)))
    return cls(**values)


def _value(name: str, text: str, kind: str, limits: tuple[float, float]) -> Any:
    what = f"engine option {name}={text!r}"
    if kind == "str":
        return text
    if kind == "bool":
        if text.lower() not in _TRUTH:
            raise UsageError(what, "neither on nor off")
        return _TRUTH[text.lower()]
    try:
        value = int(text) if kind == "int" else float(text)
    except ValueError:
        raise UsageError(what, f"not a number ({kind})") from None
    if not limits[0] <= value <= limits[1]:
        raise UsageError(what, "out of range", f"from {limits[0]:g} to {limits[1]:g}")
    return value
