"""config.json and options: what is read, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from regions.cli.errors import UsageError
from services.llama.config import Rope, from_hf
from services.llama.settings import Settings, parse

BODY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def test_defaults_are_those_of_transformers() -> None:
    config = from_hf(BODY)
    assert (config.kv_heads, config.head_dim, config.context, config.norm_eps) == (4, 16, 2048, 1e-6)
    assert (config.rope, config.tied, config.window, config.eos) == (Rope(), False, 0, ())
    assert config.kv_row == 2 * 4 * 16


def test_everything_that_is_given_is_read() -> None:
    config = from_hf(
        BODY
        | {
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "eos_token_id": [1, 2],
        }
    )
    assert (config.kv_heads, config.head_dim, config.context, config.norm_eps) == (2, 32, 512, 1e-5)
    assert (config.tied, config.eos) == (True, (1, 2))


@pytest.mark.parametrize(
    "body",
    [
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}},
    ],
)
def test_both_spellings_of_rope(body: dict[str, Any]) -> None:
    assert from_hf(BODY | body).rope == Rope(5e5, "linear", 2.0)


def test_llama3_rope() -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert from_hf(BODY | {"rope_theta": 5e5, "rope_scaling": scaling}).rope == Rope(5e5, "llama3", 8.0)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": None, "model_type": "mamba"}, "mamba"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2}}, "yarn"),
        ({"num_key_value_heads": 3}, "share"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        (
            {
                "architectures": ["MistralForCausalLM"],
                "sliding_window": 8,
                "layer_types": ["full_attention", "sliding_attention"],
            },
            "sliding",
        ),
    ],
)
def test_what_is_not_ours_is_refused_by_name(change: dict[str, Any], word: str) -> None:
    with pytest.raises(UsageError, match=word):
        from_hf(BODY | change, "thing")


def test_a_sliding_window_is_mistrals_and_not_llamas() -> None:
    window = {"sliding_window": 32}
    assert from_hf(BODY | window).window == 0
    assert from_hf(BODY | window | {"architectures": ["MistralForCausalLM"]}).window == 32
    assert from_hf(BODY | window | {"architectures": ["Qwen2ForCausalLM"]}).window == 0


def test_options() -> None:
    assert parse({}) == Settings()
    found = parse(
        {"dtype": "bf16", "kv_dtype": "fp8", "device": "cuda:1", "kv_tokens": "64", "mode": "layerwise"}
    )
    assert (found.dtype, found.kv_dtype, found.device) == ("bfloat16", "float8_e4m3fn", "cuda:1")
    assert (found.kv_tokens, found.mode) == (64, "layerwise")


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"colour": "red"}, "colour"),
        ({"block": "0"}, "out of range"),
        ({"block": "sixteen"}, "not a whole number"),
        ({"dtype": "int4"}, "int4"),
        ({"dtype": "fp8"}, "no type for weights"),
        ({"device": "tpu"}, "device"),
        ({"device": "cpu:0"}, "device"),
        ({"mode": "fast"}, "cached, layerwise"),
        ({"kv_tokens": "64", "kv_memory_mb": "1"}, "twice"),
    ],
)
def test_wrong_options_are_named(options: dict[str, str], word: str) -> None:
    with pytest.raises(UsageError, match=word):
        parse(options)
