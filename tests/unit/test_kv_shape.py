"""Bytes of the KV cache: against arithmetic written out by hand, and laws that hold for every shape."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.kv.shape import DTYPE_BYTES, KvShape, blocks_for, dtype_name

GIB = 1024**3

shapes = st.builds(
    KvShape,
    layers=st.integers(1, 8),
    kv_heads=st.integers(1, 16),
    head_dim=st.integers(1, 256),
    dtype=st.sampled_from(sorted(DTYPE_BYTES)),
    block=st.integers(1, 64),
    alignment=st.sampled_from((1, 16, 64)),
)


def test_the_claim_of_s12_is_64_times_too_large() -> None:
    """The user's text: O(L * d^2), 16 GB per layer at 128 K, d = 512, fp16. Right: linear, 0.25 GiB."""
    shape = KvShape(layers=1, kv_heads=4, head_dim=128, dtype="float16")
    tokens = 128 * 1024
    assert shape.kv_heads * shape.head_dim == 512
    assert shape.layer_bytes(tokens, 0) == 2 * tokens * 512 * 2 == GIB // 4
    assert 16 * GIB // shape.layer_bytes(tokens, 0) == 64


def test_linear_in_length_and_in_width() -> None:
    shape = KvShape(layers=2, kv_heads=8, head_dim=128, dtype="float16")
    assert shape.sequence_bytes(131072) == 2 * shape.sequence_bytes(65536)
    assert replace(shape, head_dim=256).sequence_bytes(4096) == 2 * shape.sequence_bytes(4096)


@pytest.mark.parametrize(
    ("dtype", "per_token"),
    [("float32", 262144), ("bfloat16", 131072), ("float16", 131072), ("float8_e4m3fn", 65536)],
)
def test_one_token_of_llama_31_8b(dtype: str, per_token: int) -> None:
    assert KvShape(layers=32, kv_heads=8, head_dim=128, dtype=dtype).bytes_per_token == per_token


@pytest.mark.parametrize(
    ("tokens", "window", "blocks"),
    [
        (0, 0, 0),
        (1, 0, 1),
        (16, 0, 1),
        (17, 0, 2),
        (100, 32, 3),
        (33, 32, 3),
        (32, 32, 2),
        (5, 1, 1),
        (99, 1, 1),
    ],
)
def test_blocks_are_whole_and_a_window_bounds_them(tokens: int, window: int, blocks: int) -> None:
    assert blocks_for(tokens, 16, window) == blocks


@given(
    tokens=st.integers(1, 300), block=st.integers(1, 40), window=st.integers(1, 100), chunk=st.integers(1, 50)
)
def test_a_window_needs_exactly_the_blocks_it_touches_at_worst(
    tokens: int, block: int, window: int, chunk: int
) -> None:
    """Against the definition: steps of `chunk` tokens, each holding the blocks from the first token that its
    first query sees to its own last one, from every possible start."""
    worst = max(
        (min(first + chunk, tokens) - 1) // block - max(0, first - window + 1) // block + 1
        for first in range(tokens)
    )
    assert worst <= blocks_for(tokens, block, window, chunk)
    if tokens > window + chunk + block:
        assert worst == blocks_for(tokens, block, window, chunk)


@given(shape=shapes, tokens=st.integers(0, 5000), more=st.integers(0, 100))
def test_more_tokens_never_cost_less_and_rounding_costs_less_than_a_block(
    shape: KvShape, tokens: int, more: int
) -> None:
    assert shape.sequence_bytes(tokens) <= shape.sequence_bytes(tokens + more)
    exact = tokens * shape.bytes_per_token
    assert exact <= shape.sequence_bytes(tokens) < exact + shape.bytes_per_block
    assert shape.sequence_bytes(tokens) == shape.per_layer_bytes(tokens)
    assert shape.sequence_bytes(tokens) == sum(shape.layer_bytes(tokens, n) for n in range(shape.layers))


@given(shape=shapes, memory=st.integers(0, 1 << 34))
def test_the_blocks_of_a_memory_fit_and_one_more_doesnt(shape: KvShape, memory: int) -> None:
    blocks = shape.pool_blocks(memory)
    assert shape.pool_bytes(blocks) <= memory < shape.pool_bytes(blocks + 1)


def test_alignment_pads_each_head() -> None:
    shape = KvShape(layers=1, kv_heads=2, head_dim=80, dtype="float16", alignment=64)
    assert shape.bytes_per_token_layer == 2 * 2 * 192
    assert replace(shape, alignment=1).bytes_per_token_layer == 2 * 2 * 160


def test_keep_all_is_ratio_one_and_a_window_is_w_over_l() -> None:
    shape = KvShape(layers=4, kv_heads=2, head_dim=64)
    assert shape.memory_ratio(32768) == 1.0
    assert shape.with_window(4096).memory_ratio(32768) == 4096 / 32768
    assert shape.with_window(4096).memory_ratio(1000) == 1.0
    assert shape.with_window(4096).with_window(0) == shape


def test_one_layer_that_keeps_all_keeps_it_for_the_whole_pool() -> None:
    shape = KvShape(layers=3, kv_heads=1, head_dim=64, windows=(128, 128, 0))
    assert shape.pool_window == 0
    assert shape.sequence_bytes(4096) == 3 * shape.layer_bytes(4096, 2)
    assert shape.per_layer_bytes(4096) == shape.layer_bytes(4096, 2) + 2 * shape.layer_bytes(4096, 0)
    assert replace(shape, windows=(128, 64, 128)).pool_window == 128


def test_the_kind_of_attention_by_its_heads() -> None:
    kinds = [KvShape(1, kv, 64, heads=8).kind for kv in (8, 2, 1)]
    assert kinds == ["MHA", "GQA", "MQA"]
    assert KvShape(1, 1, 64).kind == ""


@pytest.mark.parametrize(
    "wrong",
    [
        {"layers": 0},
        {"kv_heads": -1},
        {"head_dim": 0},
        {"block": 0},
        {"alignment": 0},
        {"dtype": "int3"},
        {"windows": (1,)},
    ],
)
def test_what_is_no_shape_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        replace(KvShape(2, 1, 64), **wrong)  # type: ignore[arg-type]


def test_names_of_types() -> None:
    assert [dtype_name(n) for n in ("BF16", "torch.float16", "fp8", "float8_e5m2", " fp32 ")] == [
        "bfloat16",
        "float16",
        "float8_e4m3fn",
        "float8_e5m2",
        "float32",
    ]
    with pytest.raises(ValueError, match="known: fp32"):
        dtype_name("q4_k_m")
