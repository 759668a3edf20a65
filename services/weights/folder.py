"""Which files a model's weights lie in, and what their headers say of every tensor.

Law: reads the index and the headers, no weights. Headers are parsed by safetensors; ours is only the
explanation when it refuses one.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from services.weights import faults
from services.weights.header import LENGTH, entries
from services.weights.plan import ITEM_BYTES, Fact, expected_bytes

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass(frozen=True, slots=True)
class Shard:
    """One file. header: bytes before the first tensor."""

    path: Path
    header: int
    facts: tuple[Fact, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Folder:
    """All shards by file name."""

    path: Path
    shards: Mapping[str, Shard]

    @property
    def facts(self) -> tuple[Fact, ...]:
        return tuple(fact for shard in self.shards.values() for fact in shard.facts)

    @property
    def paths(self) -> Mapping[str, Path]:
        return {name: shard.path for name, shard in self.shards.items()}


def read_folder(folder: Path) -> Folder:
    """Raises WeightsError naming the shard: missing, cut off, corrupt, of a dtype we don't read."""
    index = folder / INDEX
    if index.is_file():
        wanted = _index(index)
        shards = _sharded(folder, wanted)
    else:
        shards = {path.name: read_shard(path) for path in _without_index(folder)}
    return Folder(folder, shards)


def _index(path: Path) -> Mapping[str, str]:
    """Tensor → file name."""
    try:
        weight_map = json.loads(path.read_bytes())["weight_map"]
        wanted = {str(tensor): str(shard) for tensor, shard in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise faults.WeightsError(str(path), f"is no index of shards: {error!r}") from error
    if outside := sorted({s for s in wanted.values() if Path(s).name != s}):
        raise faults.WeightsError(str(path), f"names files outside its folder: {outside[0]}")
    return wanted


def _sharded(folder: Path, wanted: Mapping[str, str]) -> dict[str, Shard]:
    counts = Counter(wanted.values())
    shards = {}
    for name, tensors in sorted(counts.items()):
        if not (folder / name).is_file():
            raise faults.missing(folder / name, tensors, INDEX)
        shards[name] = read_shard(folder / name)
    # What the index doesn't name, or puts elsewhere, isn't loaded twice.
    kept = {}
    for name, shard in shards.items():
        facts = tuple(fact for fact in shard.facts if wanted.get(fact.tensor) == name)
        if len(facts) != counts[name]:
            gone = sorted({t for t, s in wanted.items() if s == name} - {f.tensor for f in facts})
            why = f"holds no tensor {gone[0]}; {INDEX} puts it there"
            raise faults.WeightsError(f"shard {name}", why, shard=name)
        kept[name] = Shard(shard.path, shard.header, facts, shard.nbytes)
    return kept


def _without_index(folder: Path) -> list[Path]:
    found = [folder / SINGLE] if (folder / SINGLE).is_file() else sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found
    if found:
        names = ", ".join(path.name for path in found[:3])
        raise faults.WeightsError(str(folder), f"several shards ({names}, ...) and no {INDEX}")
    others = sorted(p.name for kind in ("*.gguf", "*.bin", "*.pt") for p in folder.glob(kind))
    why = f"no {SINGLE}" + (f", only {others[0]}" if others else "")
    raise faults.WeightsError(str(folder), why, "give a folder with weights in safetensors")


def read_shard(path: Path) -> Shard:
    """Facts about every tensor of one file, in the order of the file."""
    try:
        with path.open("rb") as file:
            header = LENGTH + int.from_bytes(file.read(LENGTH), "little")
        with safe_open(path, framework="numpy") as opened:
            # The format allows no holes, and safetensors has checked that.
            slices = {name: opened.get_slice(name) for name in opened.offset_keys()}
            kinds = {name: (str(s.get_dtype()), tuple(s.get_shape())) for name, s in slices.items()}
    except SafetensorError as error:
        raise _explained(path, error) from error
    except OSError as error:
        raise faults.unreadable(path, error) from error
    facts, at = [], header
    for name, (dtype, shape) in kinds.items():
        if dtype not in ITEM_BYTES:
            raise faults.bad_dtype(path, name, dtype, ", ".join(ITEM_BYTES))
        size = expected_bytes(dtype, shape)
        facts.append(Fact(path.name, name, dtype, shape, at, at + size))
        at += size
    return Shard(path, header, tuple(facts), at)


def _explained(path: Path, error: SafetensorError) -> faults.WeightsError:
    """Why safetensors refused it: cut off (with both sizes and the tensor), or a senseless header."""
    actual = path.stat().st_size
    with path.open("rb") as file:
        weights_at = LENGTH + int.from_bytes(file.read(LENGTH), "little")
    if not LENGTH < weights_at <= actual:
        return faults.corrupt_header(path, f"{error}; the file has {actual} bytes")
    try:
        ends = {entry.name: weights_at + entry.end for entry in entries(path)}
        expected = max(ends.values())
    except ValueError:
        return faults.corrupt_header(path, str(error))
    if expected == actual:
        return faults.corrupt_header(path, str(error))
    cut = sorted((end, name) for name, end in ends.items() if end > actual)
    return faults.truncated(path, expected, actual, cut[0][1] if cut else "")
