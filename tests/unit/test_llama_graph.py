"""Buckets and buffers of decoding with graphs, without a GPU; flash attention against the plain way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from regions.cli.errors import UsageError
from services.llama.attention import Sdpa
from services.llama.batch import LEAST_WIDTH, build, groups
from services.llama.blocks import Blocks
from services.llama.config import LlamaConfig, Rope
from services.llama.decoder import Decoder
from services.llama.flash import Flash, choose
from services.llama.graph import Buckets, make, table
from services.llama.planner import Planner
from services.llama.pool import KvPool
from services.llama.sequence import Sequence

pytestmark = pytest.mark.torch


@given(st.integers(1, 200), st.integers(1, 200), st.data())
def test_a_bucket_holds_the_step_and_is_less_than_twice_as_large(
    rows: int, blocks: int, data: st.DataObject
) -> None:
    buckets = Buckets(rows, blocks)
    wanted = data.draw(st.integers(1, rows)), data.draw(st.integers(1, blocks))
    found = buckets.of(*wanted)
    assert all(w <= f < 2 * w or f == w for w, f in zip(wanted, found, strict=True))
    assert found[0] <= rows
    assert found[1] <= blocks
    assert buckets.of(*found) == found


def test_there_are_as_many_buckets_as_are_counted() -> None:
    buckets = Buckets(6, 9)
    assert buckets.count() == len({buckets.of(r, b) for r in range(1, 7) for b in range(1, 10)}) == 4 * 5
    for wrong in ((0, 1), (7, 1), (1, 10)):
        with pytest.raises(ValueError, match="largest"):
            buckets.of(*wrong)


def test_rows_beyond_the_sequences_repeat_the_first() -> None:
    one = Sequence([5, 6, 7], 2, 9, computed=2, blocks=[4, 2])
    two = Sequence([8] * 10, 9, 9, computed=9, blocks=[3, 0, 1], dropped=2)
    found = table((one, two), 4, 4, 2)
    assert found[0] == [7, 2, 2 * 2 + 0, 0, 2, 4, 2, 4, 4]
    # Position 9 lies in the fifth block of two, the third of those that are left: block 1, second place.
    assert found[1] == [8, 9, 1 * 2 + 1, 4, 9, 3, 0, 1, 3]
    assert found[2] == found[3] == found[0]


def _config(window: int) -> LlamaConfig:
    return LlamaConfig("x", 64, 32, 48, 2, 4, 2, 8, 128, 1e-5, Rope(), tied=True, window=window)


def _weights(config: LlamaConfig) -> dict[str, Tensor]:
    dice = torch.Generator().manual_seed(0)
    keys, hidden, inner = config.kv_heads * config.head_dim, config.hidden, config.intermediate
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (64, hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(config.layers):
        name = f"model.layers.{layer}."
        shapes |= {
            f"{name}self_attn.q_proj.weight": (32, hidden),
            f"{name}self_attn.k_proj.weight": (keys, hidden),
            f"{name}self_attn.v_proj.weight": (keys, hidden),
            f"{name}self_attn.o_proj.weight": (hidden, 32),
            f"{name}mlp.gate_proj.weight": (inner, hidden),
            f"{name}mlp.up_proj.weight": (inner, hidden),
            f"{name}mlp.down_proj.weight": (hidden, inner),
            f"{name}input_layernorm.weight": (hidden,),
            f"{name}post_attention_layernorm.weight": (hidden,),
        }
    return {name: torch.randn(*shape, generator=dice) * 0.3 for name, shape in shapes.items()}


class FlashByHand:
    """What the flash_attn package documents of these two functions, written out."""

    def flash_attn_func(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window_size: Any) -> Tensor:
        assert causal
        queries, keys = q.shape[1], k.shape[1]
        at = torch.arange(queries)[:, None] + keys - queries
        seen = torch.arange(keys)[None] <= at
        if window_size[0] >= 0:
            seen &= torch.arange(keys)[None] >= at - window_size[0]
        heads = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(*heads, attn_mask=seen, enable_gqa=True).transpose(1, 2)

    def flash_attn_with_kvcache(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, *, cache_seqlens: Tensor, **more: Any
    ) -> Tensor:
        assert cache_seqlens.dtype == torch.int32
        rows = [
            self.flash_attn_func(q[i : i + 1], k_cache[i : i + 1, :n], v_cache[i : i + 1, :n], **more)
            for i, n in enumerate(cache_seqlens.tolist())
        ]
        return torch.cat(rows)


@pytest.mark.parametrize("window", [0, 12])
@torch.inference_mode()
def test_graph_buffers_and_flash_give_the_logits_of_the_plain_way(window: int) -> None:
    config = _config(window)
    weights, device = _weights(config), torch.device("cpu")
    pool = KvPool(config, 32, 4, torch.float32, device)
    planner = Planner(Blocks(32, 4), most=5, chunk=7, window=window)
    plain = Decoder(config, weights, Sdpa(window))
    flash = Decoder(config, weights, Flash(FlashByHand(), window))
    core = make(plain, planner, pool)
    for length in (3, 11, 20):
        planner.add(Sequence(list(range(length)), length, 40))
    shapes = set()
    for _ in range(30):
        plan = planner.plan()
        batch = build(plan, pool, torch.float32, window)
        right = plain.logits(batch, pool)
        assert torch.allclose(flash.logits(batch, pool), right, atol=1e-4)
        assert torch.allclose(core.forward(plan), right, atol=1e-4)
        shapes.add((len(plan.decodes), len(plan.chunks)))
        planner.done(plan)
        for sequence, row in zip(plan.sampled, right, strict=True):
            sequence.push(int(row.argmax()))
    assert (3, 0) in shapes
    assert any(decodes and chunks for decodes, chunks in shapes), "both kinds in one step were among them"
    assert torch.allclose(
        flash._attention.whole(*_some(config)), plain._attention.whole(*_some(config)), atol=1e-5
    )


def _some(config: LlamaConfig) -> tuple[Tensor, Tensor]:
    dice = torch.Generator().manual_seed(1)
    return (
        torch.randn(30, config.heads, config.head_dim, generator=dice),
        torch.randn(30, 2, config.kv_heads, config.head_dim, generator=dice),
    )


@given(st.lists(st.integers(1, 300), max_size=20))
def test_a_long_sequence_does_not_widen_the_short_ones(widths: list[int]) -> None:
    widths.sort()
    found = groups([Sequence([0], 1, 1, blocks=[0] * width) for width in widths])
    assert [row for rows in found for row in rows] == list(range(len(widths)))
    for rows in found:
        padded = max(widths[row] for row in rows)
        assert all(padded <= max(LEAST_WIDTH, 2 * widths[row]) for row in rows)


def test_new_memory_means_new_graphs() -> None:
    config = _config(0)
    pool = KvPool(config, 8, 4, torch.float32, torch.device("cpu"))
    core = make(Decoder(config, _weights(config), Sdpa()), Planner(Blocks(8, 4), most=2, chunk=8), pool)
    core.add(Sequence([1], 1, 20))
    core.step()
    core.step()
    before = dict(core._steps)
    core.step()
    assert core._steps == before != {}, "the same block: the same buffers"
    pool.take()
    core.step()
    assert not set(map(id, before.values())) & set(map(id, core._steps.values()))


def test_which_attention() -> None:
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    assert isinstance(choose("auto", cpu, torch.float32, 0), Sdpa)
    assert isinstance(choose("sdpa", gpu, torch.bfloat16, 0), Sdpa)
    with pytest.raises(UsageError, match="can't compute"):
        choose("flash", cpu, torch.bfloat16, 0)


def test_flash_is_taken_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    from services.llama import flash

    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(flash, "find_spec", lambda _: SimpleNamespace())
    monkeypatch.setattr(flash, "import_module", lambda _: FlashByHand())
    assert isinstance(choose("auto", gpu, torch.bfloat16, 0), Flash)
    assert isinstance(choose("auto", gpu, torch.float32, 0), Sdpa)
    monkeypatch.setattr(flash, "find_spec", lambda _: None)
    assert isinstance(choose("auto", gpu, torch.bfloat16, 0), Sdpa)
    with pytest.raises(UsageError, match="not installed"):
        choose("flash", gpu, torch.bfloat16, 0)
