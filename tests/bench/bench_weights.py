"""Loading weights from the disk: ours beside dd, beside a plain safetensors load, and random blocks.

Law: figures, no asserts. A model of random weights in a folder of this bench, removed at the end. Before
every turn its files are thrown out of the page cache, and that they are out is checked; turns go A B C C B A,
best of each (a shared disk has slow moments). All bytes end in memory of the process in all ways but dd's,
which drops them.
"""

from __future__ import annotations

import os
import random
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

NAME = "weights"
SHARDS, SHARD_BYTES = 4, 128 << 20
ROUNDS = 4
OURS, DD, PLAIN = (
    "sharded loading",
    "dd iflag=direct, shard after shard",
    "safetensors load_file and every byte read",
)
OUT_OF_CACHE = 0.02
"""Share of the files that the page cache may still have at the start of a turn."""
BLOCK, READS, THREADS = 4096, 20_000, 16


def run() -> list[dict[str, Any]]:
    """About half a minute, and 0.5 GB of disk."""
    with tempfile.TemporaryDirectory(prefix="weir-bench-weights-") as text:
        folder = Path(text)
        paths = make_model(folder)
        ways: Mapping[str, Callable[[], Any]] = {
            OURS: lambda: _ours(folder),
            DD: lambda: _dd(paths),
            PLAIN: lambda: _plain(paths),
        }
        found: dict[str, list[float]] = {way: [] for way in ways}
        for warm_up in ways.values():
            warm_up()  # imports, and the file system's own first time
        for way in (*ways, *reversed(ways)) * ROUNDS:
            forget(paths)
            started = time.perf_counter()
            ways[way]()
            found[way].append(time.perf_counter() - started)
        size = sum(path.stat().st_size for path in paths)
        seconds = {way: min(times) for way, times in found.items()}
        return [*rows(size, seconds), *_random(paths)]


def make_model(folder: Path) -> list[Path]:
    """Shards of bfloat16 with an index and checksums: layers of a usual shape."""
    import json

    import torch
    from safetensors.torch import save_file

    from services.weights import sums
    from services.weights.folder import INDEX

    rows, width = 2048, 2048
    each = SHARD_BYTES // (rows * width * 2)
    dice = torch.Generator().manual_seed(1)
    weight_map, paths = {}, []
    for shard in range(SHARDS):
        tensors = {
            f"model.layers.{shard * each + i}.mlp.up_proj.weight": torch.randint(
                -(1 << 15), 1 << 15, (rows, width), dtype=torch.int16, generator=dice
            ).view(torch.bfloat16)
            for i in range(each)
        }
        path = folder / f"model-{shard + 1:05d}-of-{SHARDS:05d}.safetensors"
        save_file(tensors, path)
        weight_map |= dict.fromkeys(tensors, path.name)
        paths.append(path)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    sums.write(folder)
    return paths


def forget(paths: Sequence[Path]) -> None:
    """Out of the page cache. Raises RuntimeError when they stay: then no figure would mean anything."""
    from services.weights.sources import cached

    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    share = cached(paths)
    if share > OUT_OF_CACHE:
        raise RuntimeError(f"{share:.0%} of the files stay in the page cache")


def _ours(folder: Path) -> None:
    """As an executor does it: planned, in parallel, the way chosen by measuring, every piece checked."""
    from services.weights.arena import HostArena
    from services.weights.folder import read_folder
    from services.weights.host import views
    from services.weights.layout import layout
    from services.weights.load import load

    found = read_folder(folder)
    plan = layout(found.facts, "BF16")
    arena = HostArena(plan.size, dense=True)
    load(found, views(arena, plan))
    arena.close()


def _dd(paths: Sequence[Path]) -> None:
    for path in paths:
        command = ["dd", f"if={path}", "of=/dev/null", "bs=8M", "iflag=direct"]
        subprocess.run(command, check=True, capture_output=True)


def _plain(paths: Sequence[Path]) -> None:
    """load_file alone only maps: without the copy it would have read nothing."""
    from safetensors.torch import load_file

    for path in paths:
        kept = {name: tensor.clone() for name, tensor in load_file(path).items()}
        del kept


def rows(size: int, seconds: Mapping[str, float]) -> list[dict[str, Any]]:
    """Rates, ours against both. Where dd isn't twice as fast as a plain load, nobody is."""
    rate = {way: size / s / 1e9 for way, s in seconds.items()}
    allows = rate[DD] >= 2 * rate[PLAIN]
    return [
        _row(OURS, rate[OURS], "GB/s", DD, rate[DD], "ratio >= 0.8"),
        _row(
            f"{OURS}, the disk allows {rate[DD] / rate[PLAIN]:.2f} x", rate[OURS], "GB/s", PLAIN, rate[PLAIN]
        )
        | ({"goal": "ratio >= 2"} if allows else {}),
        _row("what the disk allows: dd", rate[DD], "GB/s", PLAIN, rate[PLAIN]),
    ]


def _random(paths: Sequence[Path]) -> Iterator[dict[str, Any]]:
    """Random 4 KiB blocks past the page cache: with the loader's threads, and one after the other."""
    from services.weights.sources import Reads

    files = [Reads(path, direct=True) for path in paths]
    try:
        many = _reads_per_s(files, [p.stat().st_size for p in paths], THREADS, READS)
        one = _reads_per_s(files, [p.stat().st_size for p in paths], 1, READS // 10)
    finally:
        for file in files:
            file.close()
    yield _row(f"random blocks of {BLOCK} bytes, {THREADS} threads", many, "1/s", "one thread", one)


def _reads_per_s(files: Sequence[Any], sizes: Sequence[int], threads: int, reads: int) -> float:
    import mmap

    def some(seed: int) -> None:
        dice, buffer = random.Random(seed), memoryview(mmap.mmap(-1, 3 * BLOCK))
        for _ in range(reads // threads):
            number = dice.randrange(len(files))
            start = dice.randrange(sizes[number] // BLOCK) * BLOCK
            files[number].take(start, start + BLOCK, buffer)

    with ThreadPoolExecutor(threads) as pool:
        started = time.perf_counter()
        list(pool.map(some, range(threads)))
        return reads / (time.perf_counter() - started)


def _row(
    metric: str, value: float, unit: str, peer: str, peer_value: float, goal: str = ""
) -> dict[str, Any]:
    return {
        "bench": NAME,
        "metric": metric,
        "value": value,
        "unit": unit,
        "goal": goal,
        "peer": peer,
        "peer_value": peer_value,
    }
