"""What a decoder of the Llama family is made of, read from a Hugging Face `config.json`.

Law: pure; a config that we would run wrongly is refused by name, never guessed at.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from regions.cli.errors import UsageError

ARCHITECTURES: Mapping[str, str] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
}
"""Those whose forward pass is exactly ours. Qwen2: biases on q, k and v; Mistral: a sliding window."""

_ROPE_KINDS = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding. theta: base. kind: "default", "linear" (positions / factor) or "llama3"."""

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Sizes in elements. window: tokens that a query sees, itself included; 0: all of them."""

    architecture: str
    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    norm_eps: float
    rope: Rope
    tied: bool
    window: int = 0
    eos: tuple[int, ...] = ()

    @property
    def kv_row(self) -> int:
        """Elements of K and V together of one token in one layer."""
        return 2 * self.kv_heads * self.head_dim


def from_hf(body: Mapping[str, Any], name: str = "model") -> LlamaConfig:
    """The config of `config.json`. name: for messages.

    Raises UsageError for an architecture, activation or rope kind that isn't ours, or sizes that don't fit.
    """
    architecture = _architecture(body, name)
    heads, hidden = _count(body, "num_attention_heads", name), _count(body, "hidden_size", name)
    kv_heads = int(body.get("num_key_value_heads") or heads)
    if heads % kv_heads:
        raise UsageError(f"model {name}", f"{heads} heads can't share {kv_heads} KV heads")
    head_dim = int(body.get("head_dim") or hidden // heads)
    activation = body.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UsageError(f"model {name}", f"activation {activation!r} is unknown", "known: silu")
    return LlamaConfig(
        architecture=architecture,
        vocabulary=_count(body, "vocab_size", name),
        hidden=hidden,
        intermediate=_count(body, "intermediate_size", name),
        layers=_count(body, "num_hidden_layers", name),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        context=int(body.get("max_position_embeddings", 2048)),
        norm_eps=float(body.get("rms_norm_eps", 1e-6)),
        rope=_rope(body, name),
        tied=bool(body.get("tie_word_embeddings", False)),
        window=_window(body, architecture, name),
        eos=_ids(body.get("eos_token_id")),
    )


def _architecture(body: Mapping[str, Any], name: str) -> str:
    found = list(body.get("architectures") or ())
    if not found:
        kinds = {kind: architecture for architecture, kind in ARCHITECTURES.items()}
        found = [kinds.get(str(body.get("model_type")), str(body.get("model_type") or "none at all"))]
    if found[0] not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UsageError(f"model {name}", f"architecture {found[0]} is not ours", f"known: {known}")
    if body.get("quantization_config"):
        raise UsageError(f"model {name}", "its weights are quantised", "take the unquantised ones")
    return str(found[0])


def _count(body: Mapping[str, Any], key: str, name: str) -> int:
    value = body.get(key)
    if not isinstance(value, int) or value < 1:
        raise UsageError(f"model {name}", f"config.json: {key} is {value!r}", "wanted a number from 1")
    return value


def _rope(body: Mapping[str, Any], name: str) -> Rope:
    """Both spellings: `rope_theta` + `rope_scaling` (as published models have it) and `rope_parameters`."""
    new = body.get("rope_parameters") or {}
    scaling = new or body.get("rope_scaling") or {}
    theta = float(new.get("rope_theta") or body.get("rope_theta") or 10_000.0)
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    if kind not in _ROPE_KINDS:
        raise UsageError(
            f"model {name}", f"rope kind {kind!r} is unknown", f"known: {', '.join(_ROPE_KINDS)}"
        )
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, kind, float(scaling["factor"]))
    return Rope(
        theta,
        kind,
        float(scaling["factor"]),
        float(scaling["low_freq_factor"]),
        float(scaling["high_freq_factor"]),
        int(scaling["original_max_position_embeddings"]),
    )


def _window(body: Mapping[str, Any], architecture: str, name: str) -> int:
    if architecture == "Qwen2ForCausalLM" and not body.get("use_sliding_window", False):
        return 0
    kinds = set(body.get("layer_types") or ())
    window = int(body.get("sliding_window") or 0)
    if architecture == "Qwen2ForCausalLM" or (window and "full_attention" in kinds):
        raise UsageError(f"model {name}", "some of its layers have a sliding window, some have none")
    return 0 if architecture == "LlamaForCausalLM" else window


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(int(v) for v in value) if isinstance(value, list) else (int(value),)
