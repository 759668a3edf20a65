"""Sleeping and waking of loaded weights: how fast, what is given back meanwhile, whether anything leaks.

Law: rows for the weights section. A wake ends where the engine would take traffic again: with a fixed prompt
answered as before sleeping.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from services.llama.config import from_hf
from services.weights.held import Weights
from tests.bench.gpu_cores import Core, make_core, sequence
from tests.bench.gpu_env import Env, clocked, tidy
from tests.bench.gpu_rows import CLAIM_WAKE, failed, row, spread

CYCLES = 5
GOAL = f"ratio <= {1 / CLAIM_WAKE:.4f}"
PROCESS = "import torch; torch.ones(1, device={device!r}).sum().item()"


@dataclass(slots=True)
class Cycles:
    """Seconds of each park and wake; shares of weights and KV given back; bytes taken for good by all."""

    parks: list[float] = field(default_factory=list)
    wakes: list[float] = field(default_factory=list)
    given: list[float] = field(default_factory=list)
    leaked: int = 0
    same: bool = True


def wake_rows(env: Env, held: Weights, load_s: float) -> Iterator[dict[str, Any]]:
    """load_s: what loading these weights took, from the disk."""
    core, build_s = yield from _built(env, held)
    yield row("from loaded weights to the first token", build_s * 1000, "ms")
    found = cycle(env, held, core)
    yield from rows_of(env, found, held.nbytes, load_s + build_s)
    _, again_s = clocked(env, lambda: first_token(env, core))
    yield row("the first sequence after a wake, graphs captured anew", again_s * 1000, "ms")
    yield _against_process(env, spread(found.wakes).p50, load_s + build_s)


def _built(env: Env, held: Weights) -> Generator[dict[str, Any], None, tuple[Core, float]]:
    """A core that has made its first token, and seconds. Without graphs where they can't be captured."""
    make = _maker(env, held)
    try:
        return clocked(env, partial(make, graph=True))
    except RuntimeError as error:
        failure = failed("CUDA graphs over loaded weights", error)
    yield failure
    return clocked(env, partial(make, graph=False))


def _maker(env: Env, held: Weights) -> Callable[..., Core]:
    batch, longest = (2, 64) if env.tiny else (8, 4096)

    def make(*, graph: bool) -> Core:
        config = from_hf(env.model)
        return first_token(env, make_core(env, config, held.tensors, batch, longest, graph=graph))

    return make


def first_token(env: Env, core: Core) -> Core:
    """One short sequence from beginning to end: a prefill and a decode step."""
    core.add(sequence(core.vocabulary, 8, 2, seed=1))
    while core.busy():
        env.deadline.check()
        core.step()
    return core


def cycle(env: Env, held: Weights, core: Core) -> Cycles:
    """Asleep and awake again, several times."""
    found, expected = Cycles(), core.witness()

    def park() -> None:
        core.park()
        held.park()

    def wake() -> Tensor:
        held.unpark()
        core.unpark()
        return core.witness()

    before = used(env)
    for _ in range(2 if env.tiny else CYCLES):
        env.deadline.check(2.0)
        awake = used(env)
        _, park_s = clocked(env, park)
        found.given.append((awake - used(env)) / (held.nbytes + core.pool_bytes))
        answer, wake_s = clocked(env, wake)
        found.same = found.same and not core.otherwise(expected, answer)
        found.parks.append(park_s)
        found.wakes.append(wake_s)
    found.leaked = used(env) - before
    return found


def rows_of(env: Env, found: Cycles, nbytes: int, cold_s: float) -> Iterator[dict[str, Any]]:
    wake_ms, cold = spread(found.wakes).p50 * 1000, "cold start in the same process"
    yield row("wake to the first token", wake_ms, "ms", peer=cold, peer_value=cold_s * 1000, goal=GOAL)
    yield row("fixed prompt answered otherwise after a wake", float(not found.same), "", goal="== 0")
    yield row("park", spread(found.parks).p50 * 1000, "ms")
    yield row("wake, weights per second", nbytes / min(found.wakes) / 1e9, "GB/s", **_copy_peer(env, nbytes))
    if env.cuda:
        yield row("given back while asleep, of weights and KV", min(found.given), "", goal=">= 0.9")
        yield row("leaked by all cycles", found.leaked / 2**20, "MiB", goal="<= 64 MiB")
    else:
        note = "read off the device's own counter; there is none"
        yield row("given back while asleep, of weights and KV", None, "", note=note)


def _copy_peer(env: Env, nbytes: int) -> dict[str, Any]:
    """How fast this machine copies so many bytes from pinned memory: no wake can be faster."""
    if not env.cuda:
        return {}
    source = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(nbytes, dtype=torch.uint8, device=env.device)
    copy = partial(target.copy_, source, non_blocking=True)
    best = min(clocked(env, copy)[1] for _ in range(3))
    del source, target, copy
    tidy(env.device)
    return {"peer": "one copy from pinned memory", "peer_value": nbytes / best / 1e9}


def _against_process(env: Env, wake_s: float, cold_s: float) -> dict[str, Any]:
    """A cold start as users see it also pays for a new process and its context on the device."""
    env.deadline.check(10.0)
    command = [sys.executable, "-c", PROCESS.format(device=str(env.device))]
    _, process_s = clocked(env, lambda: subprocess.run(command, check=True, timeout=env.deadline.left_s))
    return row(
        "wake to the first token, against a cold start with its process",
        wake_s * 1000,
        "ms",
        peer="new process, context, load, first token",
        peer_value=(process_s + cold_s) * 1000,
        goal=GOAL,
        claim="S8: 1.82 s and 47 ms",
    )


def used(env: Env) -> int:
    """Bytes of the device that are taken, by whomever: the driver's own count, not the allocator's."""
    if not env.cuda:
        return 0
    free, total = torch.cuda.mem_get_info(env.device)
    return int(total - free)
