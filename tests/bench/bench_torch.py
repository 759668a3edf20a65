"""The torch engine on this machine's CPU: eight sequences at once against one by one and transformers.

Law: figures, no asserts. Same weights, dtype, threads, prompts and token counts for all; turns in the order
A B C C B A, best of each, so that whatever else the machine does falls on all. The model is SmolLM2-135M
where it has been prepared, else random weights of its size. Peer: transformers' own `generate` with its
static cache.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from regions.cli.errors import UsageError
from services.engine import GenerateRequest
from services.engines.torch import make
from services.models.store import find

NAME = "torch"
SEQUENCES, PROMPT, ANSWER = 8, 32, 64
ROUNDS = 2
BATCHED, ONE_BY_ONE, TRANSFORMERS = "batched", "one by one", "transformers"
TURNS = (BATCHED, ONE_BY_ONE, TRANSFORMERS, TRANSFORMERS, ONE_BY_ONE, BATCHED)
SMOLLM2 = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


def run() -> list[dict[str, Any]]:
    """About a minute."""
    threads = len(os.sched_getaffinity(0))
    with model() as folder:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            best = asyncio.run(measure(folder, threads))
        finally:
            torch.set_num_threads(before)
    return rows(best, f"{folder.name}, {SEQUENCES} sequences, fp32, {threads} threads")


async def measure(folder: Path, threads: int) -> dict[str, float]:
    """Tokens per second of each way, prompts included."""
    engine = make(str(folder), {"dtype": "fp32", "device": "cpu", "threads": str(threads)})
    await engine.start()
    try:
        peer = transformers_generate(folder)
        found: dict[str, float] = {}
        for way in TURNS * ROUNDS:
            start = time.perf_counter()
            if way == TRANSFORMERS:
                tokens = await asyncio.to_thread(peer)
            elif way == BATCHED:
                tokens = sum(await asyncio.gather(*(generate(engine, i) for i in range(SEQUENCES))))
            else:
                # One tells as much as eight.
                tokens = await generate(engine, 0)
            found[way] = max(found.get(way, 0.0), tokens / (time.perf_counter() - start))
        return found
    finally:
        await engine.close()


def prompt(index: int) -> tuple[int, ...]:
    return tuple((index * 131 + 17 * i) % 40_000 + 100 for i in range(PROMPT))


async def generate(engine: Any, index: int) -> int:
    """Number of tokens made."""
    request = GenerateRequest(str(index), "", ANSWER, prompt_ids=prompt(index), ignore_eos=True)
    return len([token async for token in engine.generate(request)])


def transformers_generate(folder: Path) -> Callable[[], int]:
    """The peer, loaded; each call answers all prompts and gives the number of tokens made."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([prompt(i) for i in range(SEQUENCES)])

    def call() -> int:
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=ANSWER,
                min_new_tokens=ANSWER,
                do_sample=False,
                cache_implementation="static",
                pad_token_id=0,
            )
        return int(out.shape[0] * (out.shape[1] - PROMPT))

    return call


@contextmanager
def model() -> Iterator[Path]:
    """SmolLM2, or random weights of its shape in a temporary folder."""
    try:
        yield find("smollm2-135m-instruct")
        return
    except UsageError:
        pass
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.llama_models import byte_tokenizer

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "random-135m"
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**SMOLLM2)).save_pretrained(folder)
        byte_tokenizer(folder)
        yield folder


def rows(best: dict[str, float], what: str) -> list[dict[str, Any]]:
    """The two figures of the issue."""
    return [
        _row(f"batched decode, {what}", best[BATCHED], ONE_BY_ONE, best[ONE_BY_ONE], "ratio >= 3"),
        _row(
            f"batched decode, {what}",
            best[BATCHED],
            "transformers generate, static cache, same batch",
            best[TRANSFORMERS],
            "ratio >= 0.9",
        ),
    ]


def _row(metric: str, value: float, peer: str, peer_value: float, goal: str) -> dict[str, Any]:
    body = {"bench": NAME, "metric": metric, "value": value, "unit": "tokens/s"}
    return body | {"goal": goal, "peer": peer, "peer_value": peer_value}
