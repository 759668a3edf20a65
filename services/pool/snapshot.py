"""The snapshot of a sleeping instance: all that is needed to rebuild it elsewhere but its weights.

Law: pure; values and bytes. A file is one line (magic, version, sha256, length), then plain JSON, for people
too. No padding: it is as large as what it says, MAX_BYTES at most, and what a large model has many of is
counted instead of listed. What is foreign, of another version, cut off or changed is refused by name.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from regions.cli.errors import Exit, WeirError
from services.pool.verify import Answer
from services.recipe import Recipe

MAGIC, VERSION = "WEIR-SNAPSHOT", 2
MAX_BYTES = 45 * 1024
_LEAST_ROW = 20
"""Bytes of the shortest row there may be: 46,000 of them need not be written to see that they don't fit."""
_NUMBER = re.compile(r"\d+")


class SnapshotRefused(WeirError):
    """This is no snapshot that may be used."""

    exit_code = Exit.REFUSED

    def __init__(self, name: str, why: str, way_out: str = "") -> None:
        anew = "start the instance cold (without --from-snapshot); its next sleep writes one anew"
        super().__init__(f"snapshot {name}", why, way_out or anew)


@dataclass(frozen=True, slots=True)
class ModelFile:
    """One file of the model's folder. digest: `sha256:…` of all of it, or `sample:…` of its ends and of
    pieces in between (large weights; their loader checks them in full)."""

    name: str
    size: int
    digest: str


@dataclass(frozen=True, slots=True)
class ModelParts:
    """What stands in the model's folder. tensors: [name, dtype, shape, file, begin, end] each; of a large
    model [name with * for numbers, dtype, shape, file or *, how many]. kv: layers, kv_heads, head_dim, dtype,
    block, windows."""

    folder: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    files: tuple[ModelFile, ...] = ()
    tensors: tuple[tuple[Any, ...], ...] = ()
    kv: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """identity: of the instance, as registered. facts: services.engine.EngineFacts as a mapping. recipe: what
    the engine is built from. device: uuid it slept on. level: of its sleep. prompt, answer: the fixed prompt
    and what the engine says to it. held, asleep: its device memory in bytes, awake and asleep. taken_at: unix
    seconds. weir: version of the weir that wrote it.
    """

    identity: Mapping[str, str]
    facts: Mapping[str, Any]
    recipe: Recipe
    device: str
    level: int
    prompt: str
    answer: Answer
    held: int = 0
    asleep: int = 0
    taken_at: int = 0
    model: ModelParts = field(default_factory=ModelParts)
    weir: str = ""


def encode(snapshot: Snapshot) -> bytes:
    """The file; of the tensors as much as there is room for. Raises SnapshotRefused where the rest alone is
    larger than MAX_BYTES."""
    least = 0
    for model in _shorter(snapshot.model):
        body = json.dumps(asdict(replace(snapshot, model=model)), sort_keys=True, separators=(",", ":"))
        raw = body.encode()
        head = f"{MAGIC} {VERSION} {hashlib.sha256(raw).hexdigest()} {len(raw)}\n".encode()
        least = len(head) + len(raw)
        if least <= MAX_BYTES:
            return head + raw
    raise SnapshotRefused(snapshot.identity.get("instance", ""), f"{least} bytes, more than {MAX_BYTES}")


def _shorter(model: ModelParts) -> Iterator[ModelParts]:
    """The model with all its tensors, then with those alike in one row: within a file, then over all."""
    if len(model.tensors) * _LEAST_ROW <= MAX_BYTES:
        yield model
    for of_file in (True, False):
        alike: Counter[tuple[Any, ...]] = Counter()
        for name, dtype, shape, file, *_ in model.tensors:
            alike[_NUMBER.sub("*", name), dtype, tuple(shape), file if of_file else "*"] += 1
        rows = tuple((name, dtype, list(s), file, count) for (name, dtype, s, file), count in alike.items())
        yield replace(model, tensors=rows)


def decode(raw: bytes, name: str = "") -> Snapshot:
    """The snapshot in the file `name`. Raises SnapshotRefused."""
    head, newline, body = raw.partition(b"\n")
    words = head.decode(errors="replace").split(" ")
    if not newline or len(words) < 4 or words[0] != MAGIC:
        raise SnapshotRefused(name, "foreign: it doesn't begin as a snapshot of weir")
    _, version, digest, length, *_ = words
    if version != str(VERSION):
        raise SnapshotRefused(name, f"version {version[:20]}, this weir reads {VERSION}")
    if length != str(len(body)):
        raise SnapshotRefused(name, f"cut off: {len(body)} bytes of {length[:20]}")
    if hashlib.sha256(body).hexdigest() != digest or len(words) != 4:
        raise SnapshotRefused(name, "corrupt: its sha256 is another one")
    try:
        return _snapshot(json.loads(body))
    except (ValueError, KeyError, TypeError) as error:
        raise SnapshotRefused(name, f"its body makes no sense: {type(error).__name__} {error}") from error


def foreign(snapshot: Snapshot, identity: Mapping[str, str], facts: Mapping[str, Any]) -> str:
    """Why this snapshot is not of this instance and engine, or empty. Where it runs doesn't matter."""
    for what in ("service", "instance", "region", "stage", "version", "model"):
        if snapshot.identity.get(what) != identity.get(what):
            return f"{what} is {snapshot.identity.get(what)!r} there and {identity.get(what)!r} here"
    for what in ("name", "model", "context", "kv_block"):
        if snapshot.facts.get(what) != facts.get(what):
            return f"engine's {what} is {snapshot.facts.get(what)!r} there and {facts.get(what)!r} here"
    return ""


def changed(before: ModelParts, now: ModelParts) -> str:
    """Which of the model's files is another one than it was, or empty. New ones don't matter."""
    found = {file.name: file for file in now.files}
    for file in before.files:
        if file.name not in found:
            return f"{file.name} is gone from the model's folder"
        if found[file.name] != file:
            return f"{file.name} in the model's folder is another one than it was"
    return ""


def _snapshot(body: Mapping[str, Any]) -> Snapshot:
    model = body["model"]
    parts = ModelParts(
        folder=str(model["folder"]),
        config=dict(model["config"]),
        files=tuple(ModelFile(**row) for row in model["files"]),
        tensors=tuple(tuple(row) for row in model["tensors"]),
        kv=dict(model["kv"]),
        sampling=dict(model["sampling"]),
    )
    rest = {name: value for name, value in body.items() if name not in ("answer", "model", "recipe")}
    return Snapshot(**rest, recipe=Recipe(**body["recipe"]), answer=_answer(body["answer"]), model=parts)


def _answer(row: Mapping[str, Any]) -> Answer:
    return Answer(tuple(map(int, row["ids"])), str(row["text"]), str(row["engine"]))
