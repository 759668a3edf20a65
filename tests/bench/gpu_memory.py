"""The device's allocator under churn: how much of what it holds nothing uses, by how the KV cache is kept.

Law: one section; yields rows. All ways get the same weights and the same sequences coming and going; between
them everything is given back to the driver. Read after each step, the first quarter left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from services.llama.attention import Sdpa
from services.llama.batch import Batch
from services.llama.config import LlamaConfig, from_hf
from services.llama.decoder import Decoder
from services.llama.pool import KvPool
from tests.bench.gpu_cores import Core, make_core, sequence
from tests.bench.gpu_env import Env, random_weights, sync, tidy, wall_ms
from tests.bench.gpu_rows import CLAIM_FRAGMENTATION, churn, failed, fragmentation, row, spread, stay

PLAIN, POOL, GRAPH = "a tensor per sequence, grown by one", "paged pool", "paged pool, CUDA graph"
SEED = 5


@dataclass(frozen=True, slots=True)
class Load:
    """places[i]: lengths of the prompts that follow each other in place i, each for `stay` steps."""

    batch: int
    steps: int
    places: list[list[int]]

    @property
    def longest(self) -> int:
        return max(length + stay(length) for lengths in self.places for length in lengths)


def section(env: Env) -> Iterator[dict[str, Any]]:
    config, weights = from_hf(env.model), random_weights(env)
    for batch in (2, 3) if env.tiny else tuple(CLAIM_FRAGMENTATION):
        steps, longest = (12, 48) if env.tiny else (160, 1024)
        dice = Random(SEED + batch)
        yield from _of_batch(
            env, config, weights, Load(batch, steps, churn(batch, steps, longest, dice.randint))
        )
    del weights
    tidy(env.device)
    yield from _transfers(env)


def _of_batch(
    env: Env, config: LlamaConfig, weights: dict[str, Tensor], load: Load
) -> Iterator[dict[str, Any]]:
    ways: dict[str, Callable[[], list[float]]] = {
        PLAIN: lambda: grown(env, config, weights, load),
        POOL: lambda: pooled(
            env, make_core(env, config, weights, load.batch, load.longest, graph=False), load
        ),
        GRAPH: lambda: pooled(
            env, make_core(env, config, weights, load.batch, load.longest, graph=True), load
        ),
    }
    claim = CLAIM_FRAGMENTATION.get(load.batch)
    said = f"S13: {claim[0]} % before, {claim[1]} % after" if claim else ""
    plain: float | None = None
    for way, run in ways.items():
        metric = f"allocator fragmentation, batch {load.batch}: {way}"
        tidy(env.device)
        env.deadline.check(1.0)
        try:
            readings = run()
        except (RuntimeError, ImportError) as error:
            # A graph that can't be captured here must not cost the other ways their rows.
            yield failed(metric, error)
            continue
        if not readings:
            yield row(metric, None, "%", claim=said, note="the CPU has no such allocator; it ran")
            continue
        found = spread(readings)
        note = f"mean of {found.count} steps; p99 {found.p99:.1f} %"
        if way == PLAIN:
            plain = found.mean
            yield row(metric, found.mean, "%", claim=said, note=note)
        else:
            goal = f"<= {claim[1]} %" if claim and way == GRAPH else ""
            peer = PLAIN if plain is not None else ""
            yield row(metric, found.mean, "%", peer=peer, peer_value=plain, goal=goal, claim=said, note=note)


def _read(env: Env, into: list[float]) -> None:
    if env.cuda:
        reserved = torch.cuda.memory_reserved(env.device)
        found = fragmentation(torch.cuda.memory_allocated(env.device), reserved)
        into += [] if found is None else [found]


def _settled(readings: list[float]) -> list[float]:
    return readings[len(readings) // 4 :]


def pooled(env: Env, core: Core, load: Load) -> list[float]:
    """The engine's own steps: prompts are computed in chunks, sequences leave when they are done."""
    readings: list[float] = []
    waiting = [list(reversed(lengths)) for lengths in load.places]
    live = [_next(core, place) for place in waiting]
    for _ in range(load.steps):
        env.deadline.check()
        core.step()
        for index, one in enumerate(live):
            if one is None or one.made >= one.limit:
                live[index] = _next(core, waiting[index])
        _read(env, readings)
    for one in core.everyone():
        one.cancelled = True
    core.reap()
    return _settled(readings)


def _next(core: Core, lengths: list[int]) -> Any:
    if not lengths:
        return None
    length = lengths.pop()
    made = sequence(core.vocabulary, length, stay(length), seed=length)
    core.add(made)
    return made


class _Nowhere:
    """In place of a pool: what is written is dropped, since `Growing` keeps its own."""

    def write(self, layer: int, slots: Tensor, kv: Tensor) -> None:
        pass


class Growing(Sdpa):
    """Attention over one tensor per layer and sequence, grown by concatenation: what a cache without a pool
    does. caches[layer][place]: (tokens, 2, kv_heads, d)."""

    def __init__(self, layers: int, places: int) -> None:
        super().__init__()
        self.caches: list[list[Tensor]] = [[torch.empty(0)] * places for _ in range(layers)]

    def step(self, q: Tensor, kv: Tensor, batch: Batch, pool: KvPool, layer: int) -> Tensor:
        caches = self.caches[layer]
        for place in range(len(caches)):
            caches[place] = torch.cat((caches[place], kv[place : place + 1]))
        padded = torch.nn.utils.rnn.pad_sequence(caches, batch_first=True)
        lengths = torch.tensor([len(c) for c in caches], device=q.device)
        mask = (torch.arange(padded.shape[1], device=q.device)[None] < lengths[:, None])[:, None, None]
        k, v = padded[:, :, 0].transpose(1, 2), padded[:, :, 1].transpose(1, 2)
        out = F.scaled_dot_product_attention(q[:, :, None], k, v, attn_mask=mask, enable_gqa=True)
        return out.reshape(q.shape)


@torch.inference_mode()
def grown(env: Env, config: LlamaConfig, weights: dict[str, Tensor], load: Load) -> list[float]:
    """The same coming and going with tensors that grow. Prompts come in as noise: what they cost the
    allocator is the same."""
    growing = Growing(config.layers, load.batch)
    decoder = Decoder(config, weights, growing)
    readings: list[float] = []
    ends = [0] * load.batch
    waiting = [list(reversed(lengths)) for lengths in load.places]
    for step in range(load.steps):
        env.deadline.check()
        for place, end in enumerate(ends):
            if step >= end and waiting[place]:
                length = waiting[place].pop()
                ends[place] = step + stay(length)
                _seat(env, config, growing, place, length)
        sizes = [len(cache) for cache in growing.caches[0]]
        logits = decoder.logits(_batch(env, sizes), _Nowhere())  # type: ignore[arg-type]
        logits.argmax(-1).tolist()
        _read(env, readings)
    return _settled(readings)


def _seat(env: Env, config: LlamaConfig, growing: Growing, place: int, length: int) -> None:
    shape = (length, 2, config.kv_heads, config.head_dim)
    for caches in growing.caches:
        caches[place] = torch.randn(shape, dtype=env.dtype, device=env.device)


def _batch(env: Env, positions: Sequence[int]) -> Batch:
    at = torch.tensor(positions, dtype=torch.int64, device=env.device)
    ids, slots = torch.ones_like(at), torch.zeros_like(at)
    return Batch(ids=ids, positions=at, slots=slots, rows=None, decodes=(), prefills=[])


def _transfers(env: Env) -> Iterator[dict[str, Any]]:
    """Inputs of a step to the device: a host buffer made each time against a pinned one that is kept."""
    for size in (1 << 10,) if env.tiny else (4 << 10, 1 << 20, 64 << 20):
        env.deadline.check()
        there = torch.empty(size, dtype=torch.uint8, device=env.device)
        kept = torch.empty(size, dtype=torch.uint8, pin_memory=env.cuda).random_()

        def fresh(size: int = size, there: Tensor = there) -> None:
            there.copy_(torch.empty(size, dtype=torch.uint8).fill_(1))

        def pinned(kept: Tensor = kept, there: Tensor = there) -> None:
            there.copy_(kept.fill_(1), non_blocking=True)

        peer, ours = (spread(wall_ms(env, work, 5 if env.tiny else 50)).p50 for work in (fresh, pinned))
        sync(env.device)
        metric = f"{size >> 10} KiB written and sent to the device: a pinned buffer, kept"
        yield row(
            metric, ours * 1000, "us", peer="a new pageable one", peer_value=peer * 1000, goal="ratio <= 1"
        )
