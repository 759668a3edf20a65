"""What fits, and where it stops: the boundary is where counting by hand says it is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.kv.plan import Memory, NoRoom, plan
from services.kv.shape import KvShape
from services.kv.sizes import parse_count, parse_size, show_size

GIB = 1024**3
LLAMA = KvShape(layers=32, kv_heads=8, head_dim=128, heads=32, context=131072)


def test_llama_31_8b_on_24_gib() -> None:
    answer = plan(LLAMA, Memory(24 * GIB, 16_060_522_496), 8192)
    blocks = (24 * GIB - 16_060_522_496) // (16 * 131072)
    assert (answer.blocks, answer.sequences) == (blocks, blocks // 512)
    assert answer.longest == blocks * 16
    assert answer.none_from == blocks * 16 + 1


@given(
    memory=st.integers(1, 5000),
    context=st.integers(1, 400),
    block=st.integers(1, 20),
    window=st.one_of(st.just(0), st.integers(1, 100)),
)
def test_the_boundary_is_exact(memory: int, context: int, block: int, window: int) -> None:
    """One context shorter than each boundary still fits, the boundary itself doesn't."""
    shape = KvShape(layers=1, kv_heads=1, head_dim=1, dtype="float8_e4m3fn", block=block).with_window(window)
    answer = plan(shape, Memory(memory), context)

    def fitting(tokens: int) -> int:
        return plan(shape, Memory(memory), tokens).sequences

    assert answer.sequences == memory // shape.bytes_per_block // shape.blocks(context)
    assert (answer.missing_bytes == 0) == (answer.sequences > 0)
    if answer.longest is None:
        assert answer.none_from is None
        assert fitting(10**9) > 0
    else:
        assert answer.none_from == answer.longest + 1
        assert fitting(answer.longest + 1) == 0
        assert answer.longest == 0 or fitting(answer.longest) > 0
    if answer.one_less_from is not None:
        assert fitting(answer.one_less_from) < answer.sequences
        assert fitting(answer.one_less_from - 1) == answer.sequences
    elif answer.sequences:
        assert fitting(10**9) == answer.sequences


def test_a_window_long_enough_to_fit_bounds_every_sequence() -> None:
    answer = plan(LLAMA.with_window(4096), Memory(GIB), 131072)
    assert (answer.longest, answer.none_from) == (None, None)
    assert answer.ratio == 4096 / 131072
    assert answer.sequences == GIB // (16 * 131072) // 257


def test_memory_smaller_than_the_weights_is_no_plan() -> None:
    with pytest.raises(NoRoom):
        plan(LLAMA, Memory(8 * GIB, 16 * GIB), 8192)
    with pytest.raises(NoRoom):
        plan(LLAMA, Memory(8 * GIB, 7 * GIB, GIB), 8192)


@pytest.mark.parametrize("context", [0, -1])
def test_a_context_is_at_least_one_token(context: int) -> None:
    with pytest.raises(ValueError, match="context"):
        plan(LLAMA, Memory(GIB), context)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GiB", 8 * GIB),
        ("8 Gi", 8 * GIB),
        ("8GB", 8 * 10**9),
        ("1.5g", 15 * 10**8),
        ("512MiB", 512 << 20),
        ("100", 100),
        ("100B", 100),
    ],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "8 GiBs", "1e9", "NaN", "8QiB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="no size"):
        parse_size(text)


def test_sizes_are_shown_short() -> None:
    assert [show_size(n) for n in (0, 1023, 1024, 131072, GIB * 3 // 2, 141 * GIB)] == [
        "0 B",
        "1023 B",
        "1 KiB",
        "128 KiB",
        "1.5 GiB",
        "141 GiB",
    ]


def test_counts_are_read() -> None:
    assert [parse_count(t) for t in ("8192", "8_192", "8k", "1M")] == [8192, 8192, 8192, 1 << 20]
    with pytest.raises(ValueError, match="no number of tokens"):
        parse_count("many")
