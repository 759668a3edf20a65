"""From a file to the device: load rate and cold start; what sleeps and wakes then is gpu_wake.py's.

Law: one section; yields rows. Writes one file of random weights to a temporary folder and removes it. What
weir does (services/weights) stands beside what the machine can (plain reads, pinned copies).
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import tempfile
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from services.weights import open_weights
from tests.bench.gpu_env import Env, clocked, now, random_weights, sync, tidy
from tests.bench.gpu_rows import row
from tests.bench.gpu_wake import wake_rows

FILE = "model.safetensors"
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}


def section(env: Env) -> Iterator[dict[str, Any]]:
    folder = Path(tempfile.mkdtemp(prefix="weir-gpu-bench-"))
    try:
        size = write_model(folder, env.model, random_weights(env))
        tidy(env.device)
        disk = yield from _disk(env, folder, size)
        yield from _others(env, folder, size)
        yield from _ours(env, folder, size, disk)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        tidy(env.device)


def write_model(folder: Path, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> int:
    """config.json and one safetensors file, by hand: a header of JSON, then the bytes. Its size."""
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in weights.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    (folder / "config.json").write_text(json.dumps(dict(config)))
    with (folder / FILE).open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for tensor in weights.values():
            file.write(_bytes(tensor.detach().cpu().contiguous()))
        file.flush()
        os.fsync(file.fileno())
    return (folder / FILE).stat().st_size


def _bytes(tensor: Tensor) -> memoryview:
    """Its memory, without numpy (which torch may lack)."""
    size = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr()))


def forget(path: Path) -> None:
    """Out of the page cache, so that the next read is one from the disk."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _disk(env: Env, folder: Path, size: int) -> Generator[dict[str, Any], None, float]:
    """What one plain reader gets: the peer of all loading. Returns GB/s with the page cache dropped."""
    rates = {}
    for state in ("page cache dropped", "from the page cache"):
        env.deadline.check(2.0)
        if state.endswith("dropped"):
            forget(folder / FILE)
        begin = now()
        buffer = bytearray(16 << 20)
        with (folder / FILE).open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
        rates[state] = size / (now() - begin) / 1e9
        yield row(f"plain read of {size >> 20} MiB, {state}", rates[state], "GB/s")
    return rates["page cache dropped"]


def _others(env: Env, folder: Path, size: int) -> Iterator[dict[str, Any]]:
    """safetensors' own loader, where it is."""
    try:
        from safetensors.torch import load_file
    except ImportError:
        yield row("safetensors load_file", None, "GB/s", note="not on this machine")
        return
    for state in ("page cache dropped", "from the page cache"):
        env.deadline.check(3.0)
        if state.endswith("dropped"):
            forget(folder / FILE)
        begin = now()
        loaded = load_file(str(folder / FILE), device=str(env.device))
        sync(env.device)
        yield row(
            f"safetensors load_file to {env.device.type}, {state}", size / (now() - begin) / 1e9, "GB/s"
        )
        del loaded
        tidy(env.device)


def _ours(env: Env, folder: Path, size: int, disk: float) -> Iterator[dict[str, Any]]:
    dtype = str(env.dtype).removeprefix("torch.")

    def load() -> Any:
        return open_weights(folder, device=str(env.device), dtype=dtype)

    env.deadline.check(3.0)
    forget(folder / FILE)
    held, cold_s = clocked(env, load)
    rate = size / cold_s / 1e9
    peer = "plain read, page cache dropped"
    yield row(
        "weir load, page cache dropped", rate, "GB/s", peer=peer, peer_value=disk, claim="S17: 12.8 GB/s"
    )
    yield row("weir load, how", None, "", note=str(held.report)[:300])
    try:
        yield from wake_rows(env, held, cold_s)
    finally:
        held.close()
    env.deadline.check(3.0)
    warm, warm_s = clocked(env, load)
    warm.close()
    yield row("weir load, from the page cache", size / warm_s / 1e9, "GB/s")
