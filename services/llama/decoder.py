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
        x, cos, sin = self.enter(batch.ids, batch.positions)
        for index, layer in enumerate(self.layers):
            h = F.rms_norm(x, (x.shape[-1],), layer.norm, self.config.norm_eps)
            q, kv = self._qkv(layer, h, cos, sin)
            pool.write(index, batch.slots, kv)
            out = self._attention.step(q, kv, batch, pool, index)
            self._finish(layer, x, out)
        return self.head_of(x if batch.rows is None else x[batch.rows])

    def whole_layer(self, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        """One layer over one whole sequence x (T, hidden), in place; no cache."""
        h = F.rms_norm(x, (x.shape[-1],), layer.norm, self.config.norm_eps)
        q, kv = self._qkv(layer, h, cos, sin)
        self._finish(layer, x, self._attention.whole(q, kv))

    def enter(self, ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states (T, hidden) that nobody else holds, cosine and sine (T, 1, d)."""
        angles = self._rope[positions]
        return F.embedding(ids, self.embed), angles[:, :1], angles[:, 1:]

    def head_of(self, x: Tensor) -> Tensor:
        return F.linear(F.rms_norm(x, (x.shape[-1],), self.norm, self.config.norm_eps), self.head)

    def _qkv(self, layer: Layer, h: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """q (T, heads, d), rotated; kv (T, 2, kv_heads, d), its K rotated."""
        config, count = self.config, h.shape[0]
        q = F.linear(h, layer.q, layer.q_bias).view(count, config.heads, config.head_dim)
        k = F.linear(h, layer.k, layer.k_bias).view(count, config.kv_heads, config.head_dim)
        v = F.linear(h, layer.v, layer.v_bias).view(count, config.kv_heads, config.head_dim)
        return rotate(q, cos, sin), torch.stack((rotate(k, cos, sin), v), 1)

    def _finish(self, layer: Layer, x: Tensor, attended: Tensor) -> None:
        """Output projection and MLP, each added to x in place."""
        x.add_(F.linear(attended.view(x.shape[0], -1), layer.o, layer.o_bias))
        h = F.rms_norm(x, (x.shape[-1],), layer.mlp_norm, self.config.norm_eps)
        gated = F.silu(F.linear(h, layer.gate, layer.gate_bias)).mul_(F.linear(h, layer.up, layer.up_bias))
        x.add_(F.linear(gated, layer.down, layer.down_bias))


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
