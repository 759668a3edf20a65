"""One decode step of the torch engine: CUDA graph against eager, in the middle and at the end of the scale.

Law: one section; yields rows. Both ways run the engine's own step on the same prompts and the same weights.
On the CPU there is nothing to capture: the same buffers run without it, and figures say nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from services.llama.config import LlamaConfig, from_hf
from tests.bench.gpu_cores import Core, make_core, sequence
from tests.bench.gpu_env import Env, now, random_weights, sync, tidy
from tests.bench.gpu_rows import CLAIM_LAUNCH, Spread, decode_batches, failed, row, spread

PEER = "eager"
ERROR_GOAL = "<= 0.02"


def section(env: Env) -> Iterator[dict[str, Any]]:
    config, weights = from_hf(env.model), random_weights(env)
    context, steps = (24, 6) if env.tiny else (512, 200)
    for batch in decode_batches(tiny=env.tiny):
        env.deadline.check(2.0)
        eager = _running(env, config, weights, batch, context, steps, graph=False)
        plain, plain_launch = _steps(env, eager, steps), _launches(env, eager)
        del eager
        tidy(env.device)
        try:
            graph = _running(env, config, weights, batch, context, steps, graph=True)
            yield from _rows(batch, _steps(env, graph, steps), plain)
            yield from _launch_rows(batch, _launches(env, graph), plain_launch)
            yield row(
                f"batch {batch}: graph against eager, relative error", graph.error(), "", goal=ERROR_GOAL
            )
            del graph
        except (RuntimeError, ImportError) as error:
            yield failed(f"decode step, batch {batch}: graph (eager: {plain.mean:.3f} ms)", error)
        tidy(env.device)


def _running(
    env: Env, config: LlamaConfig, weights: Any, batch: int, context: int, steps: int, *, graph: bool
) -> Core:
    """`batch` sequences of `context` tokens each, all of them decoding."""
    # Twice what the timed steps need: warm-up and launches come on top, and nobody may finish meanwhile.
    answer = 2 * steps + 16
    core = make_core(env, config, weights, batch, context + answer, graph=graph)
    for place in range(batch):
        core.add(sequence(core.vocabulary, context, answer, seed=place))
    while not core.all_decode(batch):
        env.deadline.check()
        core.step()
    for _ in range(4):  # a graph is captured in the first of these
        core.step()
    return core


def _steps(env: Env, core: Core, steps: int) -> Spread:
    """Milliseconds of whole steps: plan, compute, sample, bring the tokens to the host."""
    found = []
    for _ in range(steps):
        env.deadline.check()
        begin = now()
        core.step()
        found.append((now() - begin) * 1000)
    return spread(found)


def _launches(env: Env, core: Core) -> Spread:
    """Milliseconds that the host is busy until the device has been told all of one step's work."""
    found = []
    with torch.inference_mode():
        launch = core.launcher()
        for _ in range(3 if env.tiny else 30):
            sync(env.device)
            begin = now()
            launch()
            found.append((now() - begin) * 1000)
    sync(env.device)
    return spread(found)


def _rows(batch: int, graph: Spread, eager: Spread) -> Iterator[dict[str, Any]]:
    rate = f"{batch / graph.mean * 1000:.0f} tokens/s against {batch / eager.mean * 1000:.0f}"
    for name in ("mean", "p50", "p99"):
        ours, theirs = getattr(graph, name), getattr(eager, name)
        metric = f"decode step, batch {batch}, {name}: graph"
        yield row(metric, ours, "ms", peer=PEER, peer_value=theirs, note=rate if name == "mean" else "")


def _launch_rows(batch: int, graph: Spread, eager: Spread) -> Iterator[dict[str, Any]]:
    yield row(
        f"host time to launch a step, batch {batch}: graph",
        graph.p50,
        "ms",
        peer=PEER,
        peer_value=eager.p50,
        goal=f"ratio <= {CLAIM_LAUNCH}",
        claim="S13: launch overhead -42 %",
    )
