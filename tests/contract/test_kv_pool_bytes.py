"""The accounting and the torch engine's pool agree to the byte, and on how many blocks a sequence holds.

The bytes are read off the tensors, not off the pool's own figure.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.kv.config import shape_of
from services.llama.blocks import Blocks
from services.llama.config import from_hf
from services.llama.planner import Planner
from services.llama.sequence import Sequence
from tests.kv_ledger import Fits, KvLedger, admit

HEADS = {"MHA": 8, "GQA": 2, "MQA": 1}
TYPES = ("float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2")
BLOCKS = (1, 7, 16, 32)


def config(kv_heads: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "num_hidden_layers": 3,
        "hidden_size": 192,
        "num_attention_heads": 8,
        "num_key_value_heads": kv_heads,
        "intermediate_size": 64,
        "vocab_size": 32,
        **more,
    }


@pytest.mark.torch
@pytest.mark.parametrize(("kind", "dtype", "block"), list(product(HEADS, TYPES, BLOCKS)))
def test_pool_bytes_are_what_the_tensors_take(kind: str, dtype: str, block: int) -> None:
    import torch

    from services.llama.pool import KvPool

    body = config(HEADS[kind])
    shape = shape_of(body, kv_dtype=dtype, block=block)
    assert shape.kind == kind
    pool = KvPool(from_hf(body), 13, block, getattr(torch, dtype), torch.device("cpu"))
    try:
        taken = sum(layer.numel() * layer.element_size() for layer in pool.layers)
        assert taken == shape.pool_bytes(13) == pool.nbytes
        one_row = pool.rows[0][0]
        assert one_row.numel() * one_row.element_size() == shape.bytes_per_token_layer
    finally:
        pool.close()


@pytest.mark.torch
@pytest.mark.parametrize("more", [{"head_dim": 40}, {"model_type": "mistral", "sliding_window": 9}])
def test_the_engines_own_view_of_its_pool_is_the_accounting(more: dict[str, Any]) -> None:
    import torch

    from services.llama import pool

    body = config(2, max_position_embeddings=99, **more)
    assert pool.shape_of(from_hf(body), torch.bfloat16, 16) == shape_of(body, kv_dtype="bf16")


@settings(deadline=None)
@given(
    prompt=st.integers(1, 60),
    answer=st.integers(1, 30),
    block=st.integers(1, 9),
    window=st.sampled_from((0, 1, 5, 16)),
    chunk=st.integers(1, 20),
)
def test_the_planner_never_holds_more_blocks_than_were_accounted(
    prompt: int, answer: int, block: int, window: int, chunk: int
) -> None:
    """Run on a pool of exactly the accounted size: with one block less than the peak it could not end."""
    ledger = KvLedger(200, block, window, chunk)
    # The last token is never written: nobody looks back at it.
    wanted = admit(prompt + answer - 1, ledger)
    assert isinstance(wanted, Fits)
    planner = Planner(Blocks(wanted.blocks, block), most=1, chunk=chunk, window=window)
    sequence = Sequence([0] * prompt, prompt, answer)
    planner.add(sequence)
    peak = 0
    for _ in range(prompt + answer + 2):
        plan = planner.plan()
        peak = max(peak, len(sequence.blocks))
        planner.done(plan)
        if plan.sampled and sequence.push(0):
            break
    assert sequence.made == answer
    assert planner.preemptions == 0
    assert peak <= wanted.blocks
    if not window:
        assert peak == wanted.blocks
