"""services/tenants.yaml, read strictly: every complaint with file, line and field.

Law: reads one file. No pydantic in here: nine executors start on two cores, and its import costs each of them
200 ms.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from regions.cli.errors import UsageError
from regions.plainyaml import Key, Plain, from_node
from services.tenants import DEFAULT, OTHER, Tenants

FILE = Path(__file__).with_name("tenants.yaml")
MAX_BYTES = 1 << 20
MAX_PRIORITY = 100
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_Where = tuple[Key, ...]
_Complaint = tuple[_Where, str]


def load(path: Path = FILE) -> Tenants:
    """Raises UsageError naming file, line and field of everything that is wrong."""
    plain = _plain(path)
    found = [*((fault.path, fault.reason) for fault in plain.faults), *_complaints(plain.data)]
    if found:
        lines = sorted((_line(plain, where), where, why) for where, why in found)
        said = [f"line {line}: {_name(where)}{why}" for line, where, why in lines]
        raise UsageError(str(path), "\n".join(said), "correct the lines named above and try again")
    return Tenants(
        {row["name"]: row["priority"] for row in plain.data["classes"]},
        {row["name"]: row["class"] for row in plain.data["tenants"]},
    )


def _plain(path: Path) -> Plain:
    try:
        with path.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
        node = yaml.compose(raw.decode("utf-8"), Loader=yaml.SafeLoader) if len(raw) <= MAX_BYTES else None
    except OSError as error:
        raise UsageError(str(path), error.strerror or "cannot be read") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        at = f"line {mark.line + 1}: " if mark else ""
        raise UsageError(str(path), f"{at}not YAML") from error
    if node is None:
        raise UsageError(str(path), f"empty, or larger than {MAX_BYTES} bytes")
    return from_node(node)


def _complaints(data: Any) -> Iterator[_Complaint]:
    if not isinstance(data, dict) or set(data) != {"classes", "tenants"}:
        yield (), "needs the lists `classes` and `tenants`, and nothing else"
        return
    for part, second in (("classes", "priority"), ("tenants", "class")):
        yield from _rows(data[part], part, second)
    classes = _names(data["classes"])
    for i, row in enumerate(_good(data["tenants"])):
        if row.get("class") not in classes:
            yield ("tenants", i, "class"), f"no such class; there are {', '.join(sorted(classes))}"
        if row.get("name") == OTHER:
            yield ("tenants", i, "name"), f"{OTHER!r} is what unknown tenants are counted as"
    for i, row in enumerate(_good(data["classes"])):
        value = row.get("priority")
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_PRIORITY:
            yield ("classes", i, "priority"), f"must be a whole number from 0 to {MAX_PRIORITY}"
    if DEFAULT not in _names(data["tenants"]):
        yield ("tenants",), f"needs a row {DEFAULT!r}: who names no tenant is that one"


def _rows(rows: Any, part: str, second: str) -> Iterator[_Complaint]:
    """The shape of one list: rows of a name, each once, and one more field."""
    if not isinstance(rows, list) or not rows:
        yield (part,), "must be a list of at least one row"
        return
    seen: set[str] = set()
    for i, row in enumerate(rows):
        if not isinstance(row, dict) or set(row) != {"name", second}:
            yield (part, i), f"needs the fields `name` and `{second}`, and nothing else"
            continue
        name = row["name"]
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            yield (part, i, "name"), "must be of a-z, 0-9 and -, 63 at most"
        elif name in seen:
            yield (part, i, "name"), "twice"
        else:
            seen.add(name)


def _good(rows: Any) -> list[dict[str, Any]]:
    rows = rows if isinstance(rows, list) else []
    return [row if isinstance(row, dict) else {} for row in rows]


def _names(rows: Any) -> set[Any]:
    return {row["name"] for row in _good(rows) if isinstance(row.get("name"), str)}


def _line(plain: Plain, where: _Where) -> int:
    while where and where not in plain.lines:
        where = where[:-1]
    return plain.lines.get(where, 1)


def _name(where: _Where) -> str:
    text = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in where)
    return text.removeprefix(".") + (": " if text else "")
