"""config.json → shape and weights: published models by their published figures, oddities by name."""

from __future__ import annotations

from typing import Any

import pytest

from services.kv.config import ConfigError, parameters, shape_of, weights_dtype
from services.kv.published import PUBLISHED

PARAMETERS = {
    "llama-2-7b": 6_738_415_616,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "mistral-7b-v0.1": 7_241_732_096,
    "qwen2.5-7b": 7_615_616_512,
    "smollm2-135m": 134_515_008,
}
"""As the models' cards give them (number of elements in their files)."""

SMALL: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 100,
}


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_a_published_shape_has_the_published_number_of_weights(name: str) -> None:
    assert parameters(PUBLISHED[name]) == PARAMETERS[name]
    assert weights_dtype(PUBLISHED[name]) in ("bfloat16", "float16")


def test_per_token_bytes_of_published_shapes() -> None:
    found = {name: shape_of(config).bytes_per_token for name, config in PUBLISHED.items()}
    assert found["llama-2-7b"] == 512 * 1024
    assert found["llama-3.1-8b"] == 128 * 1024
    assert found["llama-3.1-70b"] == 320 * 1024
    assert found["qwen2.5-7b"] == 56 * 1024
    assert found["smollm2-135m"] == 2 * 3 * 64 * 2 * 30


def test_head_dim_is_as_stated_or_hidden_over_heads() -> None:
    assert shape_of(SMALL).head_dim == 16
    assert shape_of({**SMALL, "head_dim": 32}).head_dim == 32
    assert shape_of({**SMALL, "head_dim": None}).head_dim == 16


def test_without_kv_heads_it_is_mha() -> None:
    config = {k: v for k, v in SMALL.items() if k != "num_key_value_heads"}
    assert (shape_of(config).kv_heads, shape_of(config).kind) == (4, "MHA")


def test_the_kv_type_follows_the_weights_unless_said() -> None:
    assert shape_of(SMALL).dtype == "float32"
    assert shape_of({**SMALL, "torch_dtype": "float16"}).dtype == "float16"
    assert shape_of({**SMALL, "dtype": "bfloat16"}).dtype == weights_dtype({**SMALL, "dtype": "bfloat16"})
    assert shape_of({**SMALL, "dtype": "bfloat16"}, kv_dtype="fp8").bytes_per_element == 1


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({"sliding_window": 8}, (8, 8, 8, 8)),
        ({"sliding_window": None}, ()),
        ({"sliding_window": 8, "use_sliding_window": False}, ()),
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3}, (0, 0, 0, 8)),
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 9}, ()),
        ({"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}, (8, 0, 8, 0)),
        ({"sliding_window": 8, "layer_types": ["full_attention"] * 4}, ()),
    ],
)
def test_windows_by_layer(fields: dict[str, Any], windows: tuple[int, ...]) -> None:
    assert shape_of({**SMALL, "model_type": "mistral", **fields}).windows == windows


def test_llama_itself_has_no_window() -> None:
    assert shape_of({**SMALL, "sliding_window": 8}).windows == ()


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_attention_heads": "4"}, "num_attention_heads"),
        ({"num_attention_heads": True}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"hidden_size": 65}, "hidden_size"),
        ({"sliding_window": -1}, "sliding_window"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["linear_attention"] * 4}, "linear_attention"),
        ({"layer_types": ["sliding_attention"] * 4}, "sliding_window"),
        ({"kv_lora_rank": 512}, "kv_lora_rank"),
        ({"torch_dtype": "int4"}, "torch_dtype"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
    ],
)
def test_what_cant_be_accounted_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        shape_of({**SMALL, **fields})


def test_the_decoder_of_a_model_with_more_senses() -> None:
    assert (
        shape_of({"model_type": "many", "torch_dtype": "bfloat16", "text_config": SMALL}).dtype == "bfloat16"
    )


def test_weights_without_a_formula_are_not_guessed() -> None:
    with pytest.raises(ConfigError, match="mixtral"):
        parameters({**SMALL, "model_type": "mixtral"})


def test_biases_are_counted() -> None:
    plain = parameters(SMALL)
    assert parameters({**SMALL, "attention_bias": True}) - plain == 4 * (64 + 32 + 32 + 64)
    assert parameters({**SMALL, "mlp_bias": True}) - plain == 4 * (128 + 128 + 64)
