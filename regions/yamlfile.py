"""Data files: one strict YAML document, validated, every complaint with file, line and field.

Law: reads files and nothing else; knows no room (the pydantic model comes from the caller). It never shows a
value of the file in a message, since somebody will one day put a token where it doesn't belong; a caller that
wants to name a value (an unknown region, say) does so itself, after its shape was checked.
Values that YAML 1.1 (Python) and YAML 1.2 (Terraform's yamldecode) read differently are refused, because the
same files are read by both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from regions.cli.errors import UsageError
from regions.plainyaml import Key, Plain, from_node

MAX_BYTES = 1 << 20
"""A data file larger than this is a mistake (a log, an image) and isn't parsed."""

M = TypeVar("M", bound="StrictModel")


class StrictModel(BaseModel):
    """Base of every file's model: no unknown field, no conversion (`"3"` is not 3), no infinities."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """One thing wrong with a data file. line counts from 1; 0 means the file as a whole."""

    file: str
    line: int
    field: str
    reason: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        return f"{place}: {self.field}: {self.reason}" if self.field else f"{place}: {self.reason}"


class DataFileError(UsageError):
    """One or more data files can't be used. `problems` has them all, sorted by file and line."""

    def __init__(self, problems: Iterable[Problem], way_out: str = "") -> None:
        self.problems = tuple(sorted(problems))
        head, *rest = [str(p) for p in self.problems] or ["no problem given"]
        what, _, why = head.partition(": ")
        super().__init__(
            what, "\n".join([why, *rest]), way_out or "correct the lines named above and try again"
        )


@dataclass(frozen=True, slots=True)
class Marked(Generic[M]):
    """A validated document that still knows its lines, for checks between fields or files."""

    value: M
    file: str
    lines: Mapping[tuple[Key, ...], int]

    def problem(self, path: tuple[Key, ...], reason: str) -> Problem:
        """A Problem at the place of `path`, e.g. ("failover", 1)."""
        return Problem(self.file, line_of(self.lines, path), field_name(path), reason)


def read_strict(path: Path, model: type[M]) -> M:
    """The document in `path` as `model`. Raises DataFileError with every problem found."""
    return read_marked(path, model).value


def read_marked(path: Path, model: type[M]) -> Marked[M]:
    """Like `read_strict`, with line marks. Raises DataFileError with every problem found."""
    file = shown(path)
    plain = _parse(file, _read(file, path))
    problems = {(f.line, f.path): Problem(file, f.line, field_name(f.path), f.reason) for f in plain.faults}
    broken = {f.path for f in plain.faults}
    try:
        value = model.model_validate(plain.data)
    except ValidationError as error:
        for detail in error.errors(include_input=False, include_url=False, include_context=False):
            loc = detail["loc"]
            if loc not in broken:
                line = line_of(plain.lines, loc)
                problems[(line, loc)] = Problem(
                    file, line, field_name(loc), _reason(detail["type"], detail["msg"])
                )
        raise DataFileError(problems.values()) from None
    if problems:
        raise DataFileError(problems.values())
    return Marked(value, file, plain.lines)


def data_files(folder: Path) -> tuple[tuple[Path, ...], tuple[Problem, ...]]:
    """The `*.yaml` files of a folder, sorted, and a problem for each file that looks like one but isn't read.

    Raises DataFileError when there is no such folder.
    """
    if not folder.is_dir():
        raise DataFileError(
            [Problem(shown(folder), 0, "", "no such folder")], "name another folder with --dir"
        )
    try:
        names = sorted(p for p in folder.iterdir() if not p.name.startswith("."))
    except OSError as error:
        raise DataFileError([Problem(shown(folder), 0, "", error.strerror or "cannot be listed")]) from error
    odd = tuple(
        Problem(shown(p), 0, "", "would be ignored: the ending must be .yaml")
        for p in names
        if p.suffix.lower() in (".yml", ".yaml") and p.suffix != ".yaml"
    )
    return tuple(p for p in names if p.suffix == ".yaml"), odd


def field_name(path: tuple[Key, ...]) -> str:
    """("gateways", "ingress") is `gateways.ingress`, ("failover", 1) is `failover[1]`."""
    text = ""
    for key in path:
        text += f"[{key}]" if isinstance(key, int) else f".{key}" if text else key
    return text


def line_of(lines: Mapping[tuple[Key, ...], int], path: tuple[Key, ...]) -> int:
    """Line of `path`, or of the nearest thing around it that the file has (a missing field has no line)."""
    while path and path not in lines:
        path = path[:-1]
    return lines.get(path, 1)


def shown(path: Path) -> str:
    """The path as a person would type it: relative when it lies below the current folder."""
    full, here = path.absolute(), Path.cwd()
    return str(full.relative_to(here) if full.is_relative_to(here) else full)


def _read(file: str, path: Path) -> str:
    try:
        with path.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise DataFileError([Problem(file, 0, "", error.strerror or "cannot be read")]) from error
    if len(raw) > MAX_BYTES:
        raise DataFileError([Problem(file, 0, "", f"larger than {MAX_BYTES} bytes")])
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise DataFileError([Problem(file, line, "", "not UTF-8 text")]) from error


def _parse(file: str, text: str) -> Plain:
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is None:
            raise DataFileError([Problem(file, 0, "", "the file is empty")])
        return from_node(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise DataFileError([Problem(file, mark.line + 1 if mark else 0, "", _yaml_reason(error))]) from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise DataFileError([Problem(file, line, "", "a control character, not YAML text")]) from error
    except RecursionError as error:
        raise DataFileError([Problem(file, 0, "", "nested too deeply")]) from error


def _yaml_reason(error: yaml.MarkedYAMLError) -> str:
    """The parser's words without its snippet of the file; a tab is named, since nobody sees it."""
    words = error.problem or "not YAML"
    if "\\t" in words:
        return "not YAML: a tab stands where only spaces may (indent with spaces)"
    # The parser quotes undefined aliases and unknown tags; the file's own text stays out of messages.
    return "not YAML: " + words.split(" '")[0].split(' "')[0]


_REASONS: Mapping[str, str] = {
    "missing": "missing",
    "extra_forbidden": "unknown field",
    "model_type": "must be a mapping of fields to values",
    "string_type": "must be text (put it in quotes if it looks like a number)",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
}


def _reason(kind: str, message: Any) -> str:
    if kind == "value_error":
        return str(message).removeprefix("Value error, ")
    text = _REASONS.get(kind, str(message))
    return text.replace("Input should be", "must be")
