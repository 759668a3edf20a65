"""The part of YAML that every reader understands the same way, with line numbers.

Law: pure. Takes a composed node tree, gives plain Python data, the line of every path, and faults; reads no
file. Refused: duplicate keys, keys that aren't text, aliases and merge keys (a person reading the file would
have to chase them, and a few of them can blow a file up to gigabytes), tags, and unquoted words that YAML 1.1
and 1.2 understand differently (`yes`, `0x10`, `1_000`, `12:30`, dates).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

Key = str | int
Path = tuple[Key, ...]

_TAG = "tag:yaml.org,2002:"
_INT = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?(0|[1-9][0-9]*)\.[0-9]+([eE][-+]?[0-9]+)?")
_NUMBER_12 = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|0o[0-7]+|0x[0-9a-fA-F]+")
_BOOLS = {"true": True, "false": False}
_NULLS = {"", "null", "~"}
_WORDS = {"y", "n", "yes", "no", "on", "off"}
"""`y` and `n` are text to PyYAML and booleans to older readers."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Something in the document that no reader should have to guess about."""

    line: int
    path: Path
    reason: str


@dataclass(slots=True)
class Plain:
    """A document as data (dict, list, str, int, float, bool, None).

    lines: 1-based line of every path; a field has its key's line.
    """

    data: Any = None
    lines: dict[Path, int] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)


def from_node(root: yaml.Node) -> Plain:
    """Plain data of a composed document. Never raises for content; faults are in the result."""
    plain = Plain()
    seen: set[int] = set()
    plain.lines[()] = root.start_mark.line + 1
    plain.data = _value(plain, seen, root, ())
    return plain


def _value(plain: Plain, seen: set[int], node: yaml.Node, path: Path) -> Any:
    line = plain.lines[path]
    if id(node) in seen:
        plain.faults.append(Fault(line, path, "an alias (`*name`); write the value out"))
        return None
    seen.add(id(node))
    if isinstance(node, yaml.MappingNode):
        return _mapping(plain, seen, node, path)
    if isinstance(node, yaml.SequenceNode):
        return _sequence(plain, seen, node, path)
    return _scalar(plain, node, path)


def _mapping(plain: Plain, seen: set[int], node: yaml.MappingNode, path: Path) -> Mapping[str, Any]:
    _check_tag(plain, node, path, "map")
    data: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != _TAG + "str":
            plain.faults.append(Fault(line, path, "a field name must be plain text"))
            continue
        key = str(key_node.value)
        if key in data:
            first = plain.lines[(*path, key)]
            plain.faults.append(Fault(line, (*path, key), f"written twice, first on line {first}"))
            continue
        plain.lines[(*path, key)] = line
        data[key] = _value(plain, seen, value_node, (*path, key))
    return data


def _sequence(plain: Plain, seen: set[int], node: yaml.SequenceNode, path: Path) -> list[Any]:
    _check_tag(plain, node, path, "seq")
    items: list[Any] = []
    for number, item in enumerate(node.value):
        plain.lines[(*path, number)] = item.start_mark.line + 1
        items.append(_value(plain, seen, item, (*path, number)))
    return items


def _scalar(plain: Plain, node: yaml.Node, path: Path) -> Any:
    text, kind = str(node.value), node.tag.removeprefix(_TAG)
    quoted = getattr(node, "style", None) is not None
    if kind == "str":
        if not quoted and (text.lower() in _WORDS or _NUMBER_12.fullmatch(text)):
            return _ambiguous(plain, path, text)
        return text
    if kind == "null" and text in _NULLS:
        return None
    if kind == "bool" and text in _BOOLS:
        return _BOOLS[text]
    if kind == "int" and _INT.fullmatch(text):
        return int(text) if len(text) < 20 else _ambiguous(plain, path, text)
    if kind == "float" and _FLOAT.fullmatch(text):
        return float(text)
    if kind in {"bool", "int", "float", "null", "timestamp", "value", "merge"}:
        return _ambiguous(plain, path, text)
    plain.faults.append(Fault(plain.lines[path], path, "a YAML tag; use plain values only"))
    return text


def _ambiguous(plain: Plain, path: Path, text: str) -> str:
    reason = (
        "YAML readers disagree about this unquoted value; put text in quotes, "
        "write booleans as true or false and numbers in plain decimal"
    )
    plain.faults.append(Fault(plain.lines[path], path, reason))
    return text


def _check_tag(plain: Plain, node: yaml.Node, path: Path, expected: str) -> None:
    if node.tag != _TAG + expected:
        plain.faults.append(Fault(plain.lines[path], path, "a YAML tag; use plain values only"))
