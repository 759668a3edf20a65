"""The plan of reads: every byte once, in the order of the layers, in blocks of equal size; and the layout."""

from __future__ import annotations

import math
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regions.cli.errors import UsageError
from services.weights.layout import ALIGN, layout, run_dtype
from services.weights.plan import BLOCKS, ITEM_BYTES, Fact, aligned, layer_of, plan, spans

LEAN = settings(max_examples=60, deadline=None)
shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)
dtypes = st.sampled_from(sorted(ITEM_BYTES))


@st.composite
def models(draw: st.DrawFn) -> list[Fact]:
    """Tensors of one to three shards, as their headers would tell: without holes."""
    facts = []
    for shard in range(draw(st.integers(1, 3))):
        at = draw(st.integers(8, 5000))
        for number, (shape, dtype) in enumerate(draw(st.lists(st.tuples(shapes, dtypes), max_size=12))):
            layer = draw(st.sampled_from(["layers.0.", "layers.1.", "layers.10.", "embed.", "head."]))
            size = math.prod(shape) * ITEM_BYTES[dtype]
            facts.append(Fact(f"s{shard}", f"{layer}{shard}.{number}", dtype, shape, at, at + size))
            at += size
    return facts


@LEAN
@given(models(), st.integers(1, 64), st.integers(8, 3000))
def test_every_byte_of_every_tensor_is_in_exactly_one_piece(
    facts: list[Fact], blocks: int, piece: int
) -> None:
    found = defaultdict(list)
    for block in plan(facts, blocks, piece):
        for p in block:
            found[p.shard, p.tensor].append((p.start, p.stop, p.offset))
    for fact in facts:
        at = fact.start
        for start, stop, offset in sorted(found.pop((fact.shard, fact.tensor), [])):
            assert (start, offset) == (at, at - fact.start)
            assert stop > start
            at = stop
        assert at == fact.stop
    assert not found


@LEAN
@given(models(), st.integers(1, 64), st.integers(8, 3000))
def test_cuts_are_between_channels_and_never_inside_a_number(
    facts: list[Fact], blocks: int, piece: int
) -> None:
    by_name = {(f.shard, f.tensor): f for f in facts}
    for block in plan(facts, blocks, piece):
        for p in block:
            fact = by_name[p.shard, p.tensor]
            row = fact.nbytes // (fact.shape[0] if fact.shape else 1)
            unit = row if row <= piece else ITEM_BYTES[fact.dtype]
            assert p.offset % unit == 0
            assert (p.stop - p.start) % unit == 0
            assert p.stop - p.start <= max(piece, unit)


@LEAN
@given(models(), st.integers(1, 64))
def test_blocks_follow_the_layers_and_are_of_equal_size(facts: list[Fact], blocks: int) -> None:
    total = sum(f.nbytes for f in facts)
    widest = max((f.nbytes // (f.shape[0] if f.shape else 1) for f in facts if f.nbytes), default=0)
    cut = plan(facts, blocks)
    assert len(cut) == blocks
    order = [layer_of(p.tensor) for block in cut for p in block]
    assert order == sorted(order)
    done = 0
    for number, block in enumerate(cut, 1):
        done += sum(p.stop - p.start for p in block)
        # A block goes on to the end of the channel in which its share is reached.
        assert total * number / blocks <= done < total * number / blocks + max(1, widest) or not block
    assert done == total


@LEAN
@given(models(), st.integers(8, 3000))
def test_spans_hold_the_same_pieces_without_holes(facts: list[Fact], longest: int) -> None:
    blocks = plan(facts, 16, longest)
    reads = spans(blocks, longest)
    pieces = sorted((p.shard, p.start, p.stop) for block in blocks for p in block)
    assert sorted((p.shard, p.start, p.stop) for span in reads for p in span.pieces) == pieces
    for span in reads:
        assert span.stop - span.start == sum(p.stop - p.start for p in span.pieces)
        assert len(span.pieces) == 1 or span.stop - span.start <= longest
    assert [span.block for span in reads] == sorted(span.block for span in reads)


@LEAN
@given(st.integers(0, 10**12), st.integers(1, 10**9))
def test_aligned_ranges_are_the_smallest_that_hold_theirs(start: int, size: int) -> None:
    first, last = aligned(start, start + size)
    assert first % 4096 == last % 4096 == 0
    assert first <= start < first + 4096
    assert last - 4096 < start + size <= last


def test_a_real_sized_model_gives_64_blocks_of_about_equal_size() -> None:
    facts, at = [], 1000
    for layer in range(4):
        for number in range(4):
            facts.append(
                Fact("m", f"model.layers.{layer}.w{number}", "BF16", (1024, 576), at, at + 1024 * 1152)
            )
            at = facts[-1].stop
    sizes = [sum(p.stop - p.start for p in block) for block in plan(facts)]
    assert len(sizes) == BLOCKS
    assert max(sizes) - min(sizes) <= 2 * 1152


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.12.mlp.up_proj.weight", 12),
        ("transformer.h.3.attn.weight", 3),
        ("model.embed_tokens.weight", -1),
    ],
)
def test_layer_of(name: str, layer: int) -> None:
    assert layer_of(name) == layer
    assert layer_of("model.norm.weight") > layer
    assert layer_of("lm_head.weight") > layer


@LEAN
@given(models(), st.sampled_from(["F32", "BF16", "F16"]))
def test_layout_gives_every_tensor_a_place_of_its_own(facts: list[Fact], dtype: str) -> None:
    found = layout(facts, dtype)
    assert found.places.keys() == {f.tensor for f in facts}
    end = 0
    for place in sorted(found.places.values(), key=lambda p: (p.offset, p.nbytes)):
        assert place.offset % ALIGN == 0
        assert place.offset >= end
        end = place.offset + place.nbytes
    assert end <= found.size < end + ALIGN + 1
    for fact in facts:
        is_float = fact.dtype in ("F64", "F32", "F16", "BF16")
        assert found.places[fact.tensor].dtype == (dtype if is_float else fact.dtype)
        assert found.places[fact.tensor].shape == fact.shape


def test_an_unknown_run_dtype_says_which_there_are() -> None:
    with pytest.raises(UsageError, match="float32, bfloat16, float16"):
        run_dtype("int4")
