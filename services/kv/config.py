"""A model's config.json (Hugging Face) → KvShape and the size of its weights.

Law: pure; takes the parsed mapping, reads no file. What can't be accounted exactly (latent attention, layers
without keys and values, encoder-decoders) is refused by name, never guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.kv.shape import DEFAULT_BLOCK, KvShape, dtype_name


class ConfigError(ValueError):
    """The config doesn't say what the cache looks like; the message names the field."""


_FULL, _SLIDING = "full_attention", "sliding_attention"


def shape_of(
    config: Mapping[str, Any], *, kv_dtype: str = "auto", block: int = DEFAULT_BLOCK, alignment: int = 1
) -> KvShape:
    """The cache of the model that this config.json describes.

    kv_dtype: "auto" takes the type of the weights. Raises ConfigError naming the field, ValueError for an
    unknown type.
    """
    text = _text_part(config)
    _refuse_other_caches(text)
    heads = _number(text, "num_attention_heads")
    kv_heads = _number(text, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise ConfigError(f"num_key_value_heads {kv_heads} doesn't divide num_attention_heads {heads}")
    layers = _number(text, "num_hidden_layers")
    return KvShape(
        layers=layers,
        kv_heads=kv_heads,
        head_dim=_head_dim(text, heads),
        dtype=weights_dtype(config) if kv_dtype == "auto" else dtype_name(kv_dtype),
        block=block,
        alignment=alignment,
        windows=_windows(text, layers),
        heads=heads,
        context=_number(text, "max_position_embeddings", 0),
    )


def weights_dtype(config: Mapping[str, Any]) -> str:
    """Type of the weights as the config states it; float32 where it says nothing. Raises ConfigError."""
    text = _text_part(config)
    stated = text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype")
    try:
        return dtype_name(str(stated)) if stated else "float32"
    except ValueError as error:
        raise ConfigError(f"torch_dtype: {error}") from None


def parameters(config: Mapping[str, Any]) -> int:
    """Number of weights of a dense decoder of the Llama family (Llama, Mistral, Qwen2, SmolLM).

    Raises ConfigError where the model isn't one: then only its files tell.
    """
    text = _text_part(config)
    kind = str(text.get("model_type", ""))
    if kind not in ("llama", "mistral", "qwen2"):
        raise ConfigError(f"model_type {kind!r}: no formula for its weights")
    hidden, inner = _number(text, "hidden_size"), _number(text, "intermediate_size")
    heads = _number(text, "num_attention_heads")
    wide = heads * _head_dim(text, heads)
    narrow = _number(text, "num_key_value_heads", heads) * _head_dim(text, heads)
    attention = 2 * hidden * wide + 2 * hidden * narrow
    if kind == "qwen2":
        attention += wide + 2 * narrow
    elif text.get("attention_bias"):
        attention += wide + 2 * narrow + hidden
    feed_forward = 3 * hidden * inner + (2 * inner + hidden if text.get("mlp_bias") else 0)
    layers = _number(text, "num_hidden_layers") * (attention + feed_forward + 2 * hidden)
    vocabulary = _number(text, "vocab_size") * hidden
    return layers + hidden + vocabulary * (1 if text.get("tie_word_embeddings") else 2)


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Models that also see or hear keep their decoder's part under `text_config`."""
    part = config.get("text_config")
    return part if isinstance(part, Mapping) else config


def _refuse_other_caches(text: Mapping[str, Any]) -> None:
    if text.get("is_encoder_decoder"):
        raise ConfigError("is_encoder_decoder: its cross-attention cache follows the input, not the sequence")
    if text.get("kv_lora_rank"):
        raise ConfigError("kv_lora_rank: latent attention keeps no key and value per head")


def _head_dim(text: Mapping[str, Any], heads: int) -> int:
    explicit = _number(text, "head_dim", 0)
    if explicit:
        return explicit
    hidden = _number(text, "hidden_size")
    if hidden % heads:
        raise ConfigError(
            f"hidden_size {hidden} is no multiple of num_attention_heads {heads}, and no head_dim"
        )
    return hidden // heads


def _windows(text: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Window of each layer; () when no layer has one.

    `layer_types` decides where it is given. Else Qwen2's pair: `use_sliding_window` switches it on, layers
    below `max_window_layers` keep all. Else `sliding_window` is every layer's (Mistral, Phi-3), and Llama has
    none whatever its config says, as in transformers.
    """
    window = _number(text, "sliding_window", 0)
    kinds = text.get("layer_types")
    if kinds is not None:
        return _typed(kinds, window, layers)
    if not window or text.get("use_sliding_window") is False or text.get("model_type") == "llama":
        return ()
    if text.get("use_sliding_window") and "max_window_layers" in text:
        full = min(_number(text, "max_window_layers", 0), layers)
        return (0,) * full + (window,) * (layers - full) if full < layers else ()
    return (window,) * layers


def _typed(kinds: object, window: int, layers: int) -> tuple[int, ...]:
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise ConfigError(f"layer_types: wanted a list of {layers}")
    unknown = sorted({str(kind) for kind in kinds} - {_FULL, _SLIDING})
    if unknown:
        raise ConfigError(f"layer_types: {unknown[0]!r} keeps another kind of state than keys and values")
    if _SLIDING not in kinds:
        return ()
    if not window:
        raise ConfigError("layer_types names sliding layers, but sliding_window is missing")
    return tuple(window if kind == _SLIDING else 0 for kind in kinds)


def _number(text: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A whole number >= 0 (>= 1 where there is no default); null counts as missing."""
    value = text.get(name)
    if value is None and default is not None:
        return default
    low = 1 if default is None else 0
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        shown = "missing" if value is None else f"{value!r}"
        raise ConfigError(f"{name}: {shown}; wanted a whole number, {low} or more")
    return value
