"""From a file to the device and back: load rate, cold start, sleeping and waking.

Law: one section; yields rows. Writes one file of random weights to a temporary folder and removes it. What
weir does (services/weights) stands beside what the machine can (plain reads, pinned copies).
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from services.llama.config import from_hf
from services.weights import open_weights
from tests.bench.gpu_cores import Core, make_core, sequence
from tests.bench.gpu_env import Env, now, random_weights, sync, tidy
from tests.bench.gpu_rows import CLAIM_WAKE, failed, row, spread

FILE = "model.safetensors"
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}
CYCLES = 5
PROCESS = "import torch; torch.empty(1, device={device!r}); torch.cuda.synchronize() if {cuda} else None"


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
    held, cold_s = _clocked(env, load)
    rate = size / cold_s / 1e9
    peer = "plain read, page cache dropped"
    yield row(
        "weir load, page cache dropped", rate, "GB/s", peer=peer, peer_value=disk, claim="S17: 12.8 GB/s"
    )
    yield row("weir load, how", None, "", note=str(held.report)[:300])
    try:
        core, build_s = yield from _built(env, held.tensors)
        yield row("from loaded weights to the first token", build_s * 1000, "ms")
        yield from _cycles(env, held, core, cold_s + build_s)
    finally:
        held.close()
    env.deadline.check(3.0)
    warm, warm_s = _clocked(env, load)
    warm.close()
    yield row("weir load, from the page cache", size / warm_s / 1e9, "GB/s")


def _built(env: Env, tensors: Mapping[str, Tensor]) -> Generator[dict[str, Any], None, tuple[Core, float]]:
    """A core that has made its first token, and seconds. Without graphs where they can't be captured."""
    config = from_hf(env.model)
    for graph in (True, False):
        try:
            return _clocked(
                env,
                lambda graph=graph: _first_token(env, make_core(env, config, tensors, 2, 64, graph=graph)),
            )
        except (RuntimeError, ImportError) as error:
            if not graph:
                raise
            yield failed("CUDA graphs over loaded weights", error)
    raise AssertionError("unreachable")


def _cycles(env: Env, held: Any, core: Core, cold_s: float) -> Iterator[dict[str, Any]]:
    """Asleep and awake again, several times: how fast, what was given back, whether anything leaks."""
    expected = core.answer(range(1, 9))
    before = _used(env)
    wakes, parks, back, same = [], [], [], True
    for _ in range(2 if env.tiny else CYCLES):
        env.deadline.check(2.0)
        held_before = _used(env)
        _, park_s = _clocked(env, lambda: (core.park(), held.park()))
        back.append((held_before - _used(env)) / (held.nbytes + core.pool_bytes) if env.cuda else None)
        _, wake_s = _clocked(env, lambda: (held.unpark(), core.unpark(), core.answer(range(1, 9))))
        same = same and core.answer(range(1, 9)) == expected
        wakes.append(wake_s)
        parks.append(park_s)
    wake = spread(wakes)
    peer = "cold start in the same process"
    goal = f"ratio <= {1 / CLAIM_WAKE:.4f}"
    yield row(
        "wake to the first token", wake.p50 * 1000, "ms", peer=peer, peer_value=cold_s * 1000, goal=goal
    )
    yield row("fixed prompt answered otherwise after a wake", float(not same), "", goal="== 0")
    yield row("park", spread(parks).p50 * 1000, "ms")
    rates = [held.nbytes / s / 1e9 for s in wakes]
    yield row("wake, weights per second", max(rates), "GB/s", **_copy_peer(env, held.nbytes))
    if env.cuda:
        given = min(share for share in back if share is not None)
        yield row("given back while asleep, of weights and KV", given, "", goal=">= 0.9")
        yield row("leaked by all cycles", (_used(env) - before) / 2**20, "MiB", goal="<= 64 MiB")
    else:
        yield row(
            "given back while asleep", None, "", note="read off the device's own counter; there is none"
        )
    yield _process(env, cold_s, wake.p50)


def _process(env: Env, cold_s: float, wake_s: float) -> dict[str, Any]:
    """A cold start as users see it also pays for a new process and its context on the device."""
    code = PROCESS.format(device=str(env.device), cuda=env.cuda)
    _, s = _clocked(env, lambda: subprocess.run([sys.executable, "-c", code], check=True, timeout=60))
    return row(
        "wake to the first token, against a cold start with its process",
        wake_s * 1000,
        "ms",
        peer="new process, context, load, first token",
        peer_value=(s + cold_s) * 1000,
        goal=f"ratio <= {1 / CLAIM_WAKE:.4f}",
        claim="S8: 1.82 s and 47 ms",
    )


def _copy_peer(env: Env, nbytes: int) -> dict[str, Any]:
    """How fast this machine copies so many bytes from pinned memory: no wake can be faster."""
    if not env.cuda:
        return {}
    source = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(nbytes, dtype=torch.uint8, device=env.device)
    best = min(_clocked(env, lambda: target.copy_(source, non_blocking=True))[1] for _ in range(3))
    return {"peer": "one copy from pinned memory", "peer_value": nbytes / best / 1e9}


def _first_token(env: Env, core: Core) -> Core:
    core.add(sequence(core.vocabulary, 8, 2, seed=1))
    while core.busy():
        env.deadline.check()
        core.step()
    return core


def _used(env: Env) -> int:
    """Bytes of the device that are taken, by whomever: the driver's own count, not the allocator's."""
    if not env.cuda:
        return 0
    free, total = torch.cuda.mem_get_info(env.device)
    return total - free


def _clocked(env: Env, work: Callable[[], Any]) -> tuple[Any, float]:
    """What it gives, and seconds."""
    sync(env.device)
    begin = now()
    found = work()
    sync(env.device)
    return found, now() - begin
