"""The snapshot of a sleeping instance: all that is needed to rebuild it elsewhere but its weights.

Law: pure; values and bytes. A file is one line (magic, version, sha256, encoding, length), then JSON.
No padding: it is as large as what it says, MAX_BYTES at most; a body beyond that is deflated. What is
foreign, of another version, cut off or changed is refused by name.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from regions.cli.errors import WeirError
from services.pool.verify import Answer

MAGIC, VERSION = "WEIR-SNAPSHOT", 1
MAX_BYTES = 45 * 1024
MAX_BODY = 4 * 2**20
"""Largest body that is unpacked."""
_PLAIN, _DEFLATED = "json", "deflate"


class SnapshotRefused(WeirError):
    """This is no snapshot that may be used."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"snapshot {name}", why, "start the instance cold; the next sleep writes it anew")


@dataclass(frozen=True, slots=True)
class ModelFile:
    """One file of the model's folder. digest: `sha256:…` of all of it, or `sample:…` of its ends and of
    pieces in between (large weights; their loader checks them in full)."""

    name: str
    size: int
    digest: str


@dataclass(frozen=True, slots=True)
class ModelParts:
    """What stands in the model's folder. tensors: [name, dtype, shape, file, begin, end] each, the map by
    which weights are found without reading them. kv: layers, kv_heads, head_dim, dtype, block, windows."""

    folder: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    files: tuple[ModelFile, ...] = ()
    tensors: tuple[tuple[Any, ...], ...] = ()
    kv: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """identity: of the instance, as registered. facts: services.engine.EngineFacts as a mapping. options: of
    the engine. device: uuid it slept on. level: of its sleep. prompt, answer: the fixed prompt and what the
    engine says to it. held, asleep: its device memory in bytes, awake and asleep. taken_at: unix seconds.
    """

    identity: Mapping[str, str]
    facts: Mapping[str, Any]
    options: Mapping[str, str]
    device: str
    level: int
    prompt: str
    answer: Answer
    held: int = 0
    asleep: int = 0
    taken_at: int = 0
    model: ModelParts = field(default_factory=ModelParts)


def encode(snapshot: Snapshot) -> bytes:
    """The file. Raises SnapshotRefused when even deflated it is larger than MAX_BYTES."""
    body = json.dumps(asdict(snapshot), sort_keys=True, separators=(",", ":")).encode()
    encoding = _PLAIN
    if len(body) > MAX_BYTES - 128:
        body, encoding = zlib.compress(body, 9), _DEFLATED
    head = f"{MAGIC} {VERSION} {hashlib.sha256(body).hexdigest()} {encoding} {len(body)}\n".encode()
    if len(head) + len(body) > MAX_BYTES:
        name = snapshot.identity.get("instance", "")
        raise SnapshotRefused(name, f"{len(head) + len(body)} bytes, more than {MAX_BYTES}")
    return head + body


def decode(raw: bytes, name: str = "") -> Snapshot:
    """The snapshot in the file `name`. Raises SnapshotRefused."""
    head, newline, body = raw.partition(b"\n")
    words = head.decode(errors="replace").split(" ")
    if not newline or len(words) != 5 or words[0] != MAGIC:
        raise SnapshotRefused(name, "foreign: it doesn't begin as a snapshot of weir")
    _, version, digest, encoding, length = words
    if version != str(VERSION):
        raise SnapshotRefused(name, f"version {version[:20]}, this weir reads {VERSION}")
    if length != str(len(body)):
        raise SnapshotRefused(name, f"cut off: {len(body)} bytes of {length[:20]}")
    if hashlib.sha256(body).hexdigest() != digest:
        raise SnapshotRefused(name, "corrupt: its sha256 is another one")
    try:
        return _snapshot(json.loads(_unpacked(body, encoding)))
    except (ValueError, KeyError, TypeError, zlib.error) as error:
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


def _unpacked(body: bytes, encoding: str) -> bytes:
    if encoding == _PLAIN:
        return body
    if encoding != _DEFLATED:
        raise ValueError(f"unknown encoding {encoding[:20]!r}")
    unpack = zlib.decompressobj()
    text = unpack.decompress(body, MAX_BODY)
    if not unpack.eof:
        raise ValueError(f"larger than {MAX_BODY} bytes")
    return text


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
    rest = {name: value for name, value in body.items() if name not in ("answer", "model")}
    return Snapshot(**rest, answer=_answer(body["answer"]), model=parts)


def _answer(row: Mapping[str, Any]) -> Answer:
    return Answer(tuple(map(int, row["ids"])), str(row["text"]), str(row["engine"]))
