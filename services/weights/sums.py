"""Checksums of weights: `weights.sum.json`, written once on `weir model prepare`, compared at every load.

Law: one sum for every piece of the plan (xxh3, 128 bits: faster than any disk; against rot, not against an
attacker) and one for each header, so that what is wrong is named by shard and tensor and the bytes are
checked by the thread that has just read them. The files beside the weights (config, tokenizer) have one each,
which `verify` alone compares: who loads them parses them anyway. `python -m services.weights.sums FOLDER`
writes the file.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from services.weights import faults
from services.weights.folder import Folder, read_folder
from services.weights.plan import BLOCKS, PIECE, Piece, Span, plan, spans
from services.weights.read import Reader

NAME = "weights.sum.json"
ALGORITHM = "xxh3_128"
SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Sums:
    """What the file says. headers: by shard. pieces: by (shard, start, stop). blocks, piece: how they were
    cut. files: the others of the folder by name; empty in sums of earlier versions."""

    headers: Mapping[str, str]
    pieces: Mapping[tuple[str, int, int], str]
    blocks: int = BLOCKS
    piece: int = PIECE
    files: Mapping[str, str] = field(default_factory=dict)


def digest(data: memoryview | bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def write(path: Path) -> int:
    """Make the sums of the model in this folder as it is now; how many shards. Raises WeightsError."""
    folder = read_folder(path)
    found: dict[str, list[tuple[int, int, str]]] = {name: [] for name in folder.shards}

    def note(span: Span, view: memoryview) -> None:
        for piece, part in parts(span, view):
            found[span.shard].append((piece.start, piece.stop, digest(part)))

    for _ in Reader(folder.paths).stream(spans(plan(folder.facts)), note):
        pass
    shards = {
        name: {"header": header_sum(folder, name), "pieces": sorted(pieces)} for name, pieces in found.items()
    }
    head = {"schema_version": SCHEMA, "algorithm": ALGORITHM, "blocks": BLOCKS, "piece": PIECE}
    scratch = path / f".{NAME}"
    body = {**head, "shards": shards, "files": _beside(folder)}
    scratch.write_text(json.dumps(body) + "\n", "utf-8")
    scratch.replace(path / NAME)
    return len(shards)


def _beside(folder: Folder) -> dict[str, str]:
    """Sums of the files that are no weights: config, tokenizer, chat template, index of the shards."""
    ours = {NAME, *folder.shards}
    others = [p for p in sorted(folder.path.glob("[!.]*")) if p.is_file() and p.name not in ours]
    return {path.name: digest(path.read_bytes()) for path in others}


def parts(span: Span, view: memoryview) -> list[tuple[Piece, memoryview]]:
    """Every piece of a read with its bytes."""
    return [(p, view[p.start - span.start : p.stop - span.start]) for p in span.pieces]


def header_sum(folder: Folder, name: str) -> str:
    shard = folder.shards[name]
    with shard.path.open("rb") as file:
        return digest(file.read(shard.header))


def read(path: Path) -> Sums | None:
    """The sums of this folder, None when it has none. Raises WeightsError when the file makes no sense."""
    file = path / NAME
    if not file.is_file():
        return None
    try:
        body: dict[str, Any] = json.loads(file.read_bytes())
        if (body["schema_version"], body["algorithm"]) != (SCHEMA, ALGORITHM):
            raise ValueError(f"version {body['schema_version']}, {body['algorithm']}")
        pieces = {
            (name, int(start), int(stop)): str(value)
            for name, shard in body["shards"].items()
            for start, stop, value in shard["pieces"]
        }
        headers = {name: str(shard["header"]) for name, shard in body["shards"].items()}
        files = {str(name): str(value) for name, value in body.get("files", {}).items()}
        return Sums(headers, pieces, int(body["blocks"]), int(body["piece"]), files)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        way_out = f"remove {file} to load unchecked, or bring the model again"
        raise faults.WeightsError(str(file), f"can't be read: {error!r}", way_out) from error


class Checker:
    """Compares what was read with the sums. None for sums: everything is fine."""

    def __init__(self, folder: Folder, sums: Sums | None) -> None:
        self._folder, self._sums = folder, sums
        if sums is not None:
            for name in folder.shards:
                self._compare(name, "its header", sums.headers.get(name), header_sum(folder, name))

    def __call__(self, span: Span, view: memoryview) -> None:
        """Raises WeightsError naming shard and tensor."""
        for piece, part in parts(span, view):
            self.piece(piece, part)

    def piece(self, piece: Piece, part: memoryview) -> None:
        """The same for one piece."""
        if self._sums is None:
            return
        wanted = self._sums.pieces.get((piece.shard, piece.start, piece.stop))
        what = f"tensor {piece.tensor} (bytes {piece.start} to {piece.stop})"
        self._compare(piece.shard, what, wanted, digest(part))

    def _compare(self, shard: str, what: str, wanted: str | None, found: str) -> None:
        if wanted is None:
            again = f"python -m services.weights.sums {self._folder.path}"
            way_out = f"`{again}` if you changed the model on purpose"
            raise faults.WeightsError(f"shard {shard}", f"{NAME} has no sum of {what}", way_out, shard=shard)
        if wanted != found:
            raise faults.bad_sum(self._folder.shards[shard].path, what, wanted, found)


def verify(path: Path) -> dict[str, Any]:
    """Read everything and compare. Raises WeightsError naming what is wrong.

    files: how many beside the weights had a sum to compare with.
    """
    folder, sums = read_folder(path), read(path)
    cut = plan(folder.facts, sums.blocks, sums.piece) if sums else plan(folder.facts)
    reader = Reader(folder.paths)
    checker = Checker(folder, sums)
    nbytes = sum(span.stop - span.start for span, _ in reader.stream(spans(cut), checker))
    files = sums.files if sums else {}
    for name, wanted in files.items():
        _compare_file(path / name, wanted)
    verdict = "as prepared" if sums else f"whole, but without {NAME} nothing to compare with"
    counts = {"shards": len(folder.shards), "bytes": nbytes, "files": len(files)}
    return {**counts, "checked": sums is not None, "verdict": verdict}


def _compare_file(path: Path, wanted: str) -> None:
    try:
        found = digest(path.read_bytes())
    except FileNotFoundError:
        raise faults.WeightsError(f"file {path.name}", f"not in {path.parent}") from None
    except OSError as error:
        raise faults.unreadable(path, error) from error
    if found != wanted:
        raise faults.bad_sum(path, "it", wanted, found)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
