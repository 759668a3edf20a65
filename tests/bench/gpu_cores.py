"""The torch engine's own step, eager or with CUDA graphs, over random weights.

Law: puts services/llama together as its engine does, without files, tokenizer or threads; what is measured is
that package's code, not a copy of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from random import Random

import torch
from torch import Tensor

from services.kv.shape import DEFAULT_BLOCK, blocks_for
from services.llama.batch import build
from services.llama.blocks import Blocks
from services.llama.cached import CachedCore
from services.llama.config import LlamaConfig
from services.llama.decoder import Decoder
from services.llama.flash import choose
from services.llama.graph import GraphCore
from services.llama.planner import Planner
from services.llama.pool import KvPool
from services.llama.sequence import Sequence
from services.llama.settings import AUTO
from services.llama.witness import otherwise
from tests.bench.gpu_env import Env

CHUNK = 512


class Core:
    """A CachedCore with what the sections ask of it."""

    def __init__(self, inner: CachedCore, vocabulary: int) -> None:
        self.inner, self.vocabulary = inner, vocabulary

    def add(self, one: Sequence) -> None:
        self.inner.add(one)

    def step(self) -> None:
        """Raises the error of a sequence that failed: a bench has no use for half a batch."""
        for outcome in self.inner.step():
            if outcome.error is not None:
                raise outcome.error

    def busy(self) -> bool:
        return self.inner.busy()

    def everyone(self) -> Iterable[Sequence]:
        return self.inner.everyone()

    def reap(self) -> None:
        self.inner.reap()

    def witness(self) -> Tensor:
        return self.inner.witness()

    def otherwise(self, expected: Tensor, found: Tensor) -> str:
        """What is wrong with `found`, as a wake of the engine judges it."""
        return otherwise(expected, found, self.inner.decoder.dtype)

    def all_decode(self, count: int) -> bool:
        """Whether `count` sequences run and each of them is past its prompt."""
        running = self.inner.planner.running
        return len(running) == count and all(one.computed >= one.prompt for one in running)

    def launcher(self) -> Callable[[], Tensor]:
        """The next step from its plan to the last thing that the device is told, without waiting for it. The
        same step each time it is called, since nobody books it."""
        inner, plan = self.inner, self.inner.planner.plan()
        if isinstance(inner, GraphCore):
            return lambda: inner.forward(plan)
        window = inner.decoder.config.window
        return lambda: inner.forward(plan, build(plan, inner.pool, inner.decoder.dtype, window))

    @torch.inference_mode()
    def error(self) -> float:
        """Relative difference between this core's logits of the next step and the eager ones."""
        plan, inner = self.inner.planner.plan(), self.inner
        batch = build(plan, inner.pool, inner.decoder.dtype, inner.decoder.config.window)
        right = inner.decoder.logits(batch, inner.pool).double()
        found = inner.forward(plan, batch).double()[: len(right)]
        return float((found - right).norm() / right.norm())

    @property
    def pool_bytes(self) -> int:
        return self.inner.pool.nbytes

    def park(self) -> None:
        self.inner.pool.give_back()

    def unpark(self) -> None:
        self.inner.pool.take()


def make_core(
    env: Env, config: LlamaConfig, weights: Mapping[str, Tensor], batch: int, longest: int, *, graph: bool
) -> Core:
    """Room for `batch` sequences of `longest` tokens. graph: with CUDA graphs; on the CPU the same buffers
    without a capture."""
    attention = choose(AUTO, env.device, env.dtype, config.window)
    decoder = Decoder(config, weights, attention)
    blocks = (batch + 1) * (blocks_for(longest, DEFAULT_BLOCK) + 1)
    pool = KvPool(config, blocks, DEFAULT_BLOCK, decoder.dtype, env.device)
    planner = Planner(Blocks(blocks, DEFAULT_BLOCK), most=batch, chunk=CHUNK, window=config.window)
    made = (GraphCore if graph else CachedCore)(decoder, planner, pool)
    return Core(made, config.vocabulary)


def sequence(vocabulary: int, length: int, answer: int, seed: int) -> Sequence:
    """A prompt of random ids, greedy, ends by length alone."""
    dice = Random(seed)
    return Sequence([dice.randrange(vocabulary) for _ in range(length)], length, answer)
