"""The forward pass: token ids to logits, K and V of the new tokens into the pool.

Law: weights and tensors; knows no requests and draws no tokens. Weights are read where they lie, by their
Hugging Face names: no fused copies (they would have to be parked too, and on a CPU a batch is bound by
reading the weights, which fusing doesn't lessen: measured 43.3 ms fused, 43.6 ms not, 8 rows of SmolLM2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from regions.cli.errors import WeirError
from services.llama.attention import Attention
from services.llama.batch import Batch
from services.llama.config import LlamaConfig
from services.llama.pool import KvPool
from services.llama.rope import rotate, table


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer; (outputs, inputs) each. Biases are None where the model has none."""

    norm: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    mlp_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    q_bias: Tensor | None
    k_bias: Tensor | None
    v_bias: Tensor | None
    o_bias: Tensor | None
    gate_bias: Tensor | None
    up_bias: Tensor | None
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class Run:
    """What goes from layer to layer: x (T, hidden), changed in place; cosine and sine (T, 1, d); room for
    q, k and v side by side (T, heads + 2 · kv_heads, d)."""

    x: Tensor
    cos: Tensor
    sin: Tensor
    room: Tensor


class Decoder:
    """One model's weights with their forward pass."""

    def __init__(self, config: LlamaConfig, weights: Mapping[str, Tensor], attention: Attention) -> None:
        """Raises WeirError naming a tensor that is missing or has another shape than the config says."""
        self.config, self._attention = config, attention
        find = _Finder(config, weights)
        self.embed = find("model.embed_tokens.weight", config.vocabulary, config.hidden)
        self.layers = tuple(_layer(find, config, index) for index in range(config.layers))
        self.norm = find("model.norm.weight", config.hidden)
        tied = config.tied or "lm_head.weight" not in weights
        self.head = self.embed if tied else find("lm_head.weight", config.vocabulary, config.hidden)
        self.dtype, self.device = self.embed.dtype, self.embed.device
        self._rope = table(config.rope, config.head_dim, config.context, self.dtype, self.device)

    def logits(self, batch: Batch, pool: KvPool) -> Tensor:
        """(rows wanted, vocabulary), in the dtype of the weights."""
        run = self.enter(batch.ids, batch.positions)
        for index, layer in enumerate(self.layers):
            q, kv = self._qkv(layer, run)
            pool.write(index, batch.slots, kv)
            self._finish(layer, run, self._attention.step(q, kv, batch, pool, index))
        return self.head_of(run.x if batch.rows is None else run.x[batch.rows])

    def whole_layer(self, layer: Layer, run: Run) -> None:
        """One layer over one whole sequence; no cache."""
        self._finish(layer, run, self._attention.whole(*self._qkv(layer, run)))

    def enter(self, ids: Tensor, positions: Tensor) -> Run:
        """What goes from layer to layer."""
        config, angles = self.config, self._rope[positions]
        heads = config.heads + 2 * config.kv_heads
        room = torch.empty((ids.shape[0], heads, config.head_dim), dtype=self.dtype, device=self.device)
        return Run(F.embedding(ids, self.embed), angles[:, :1], angles[:, 1:], room)

    def head_of(self, x: Tensor) -> Tensor:
        """Logits of hidden states x (T, hidden)."""
        return F.linear(F.rms_norm(x, (x.shape[-1],), self.norm, self.config.norm_eps), self.head)

    def _qkv(self, layer: Layer, run: Run) -> tuple[Tensor, Tensor]:
        """q (T, heads, d), rotated; kv (T, 2, kv_heads, d), its K rotated. Views of `run.room`: good until
        the next layer."""
        config, x = self.config, run.x
        h = F.rms_norm(x, (x.shape[-1],), layer.norm, config.norm_eps)
        flat, dim = run.room.view(x.shape[0], -1), config.head_dim
        queries, keys = config.heads * dim, config.kv_heads * dim
        _project(h, layer.q, layer.q_bias, flat[:, :queries])
        _project(h, layer.k, layer.k_bias, flat[:, queries : queries + keys])
        _project(h, layer.v, layer.v_bias, flat[:, queries + keys :])
        # Queries and keys lie side by side: one rotation does for both.
        turned = run.room[:, : config.heads + config.kv_heads]
        turned.copy_(rotate(turned, run.cos, run.sin))
        kv = run.room[:, config.heads :].view(x.shape[0], 2, config.kv_heads, dim)
        return run.room[:, : config.heads], kv

    def _finish(self, layer: Layer, run: Run, attended: Tensor) -> None:
        """Output projection and MLP, each added to x in place."""
        x = run.x
        _add(x, attended.reshape(x.shape[0], -1), layer.o, layer.o_bias)
        h = F.rms_norm(x, (x.shape[-1],), layer.mlp_norm, self.config.norm_eps)
        gated = F.silu(F.linear(h, layer.gate, layer.gate_bias), inplace=True)
        gated.mul_(F.linear(h, layer.up, layer.up_bias))
        _add(x, gated, layer.down, layer.down_bias)


def _project(h: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """out = h · weightᵀ + bias, written where it is wanted."""
    if bias is None:
        torch.mm(h, weight.t(), out=out)
    else:
        torch.addmm(bias, h, weight.t(), out=out)


def _add(x: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """x += h · weightᵀ + bias, without a tensor between."""
    x.addmm_(h, weight.t())
    if bias is not None:
        x.add_(bias)


class _Finder:
    """Tensors by name, checked against the shape that the config says."""

    def __init__(self, config: LlamaConfig, weights: Mapping[str, Tensor]) -> None:
        self._weights, self._architecture = weights, config.architecture

    def __call__(self, name: str, *shape: int) -> Tensor:
        if name not in self._weights:
            raise WeirError(f"weights of {self._architecture}", f"tensor {name} is missing")
        found = self._weights[name]
        if tuple(found.shape) != shape:
            raise WeirError(f"tensor {name}", f"has shape {tuple(found.shape)}, config.json says {shape}")
        return found

    def optional(self, name: str, *shape: int) -> Tensor | None:
        return self(name, *shape) if name in self._weights else None


def _layer(find: _Finder, config: LlamaConfig, index: int) -> Layer:
    prefix = f"model.layers.{index}."
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    hidden, inner = config.hidden, config.intermediate
    sizes = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    w = {name: find(f"{prefix}{name}.weight", *shape) for name, shape in sizes.items()}
    biases = [find.optional(f"{prefix}{name}.bias", shape[0]) for name, shape in sizes.items()]
    q, k, v, o, gate, up, down = w.values()
    norm = find(f"{prefix}input_layernorm.weight", hidden)
    mlp_norm = find(f"{prefix}post_attention_layernorm.weight", hidden)
    return Layer(norm, q, k, v, o, mlp_norm, gate, up, down, *biases)
