"""Shapes of published models, for planning before the weights are here.

Law: facts of the models' public config.json files, only the fields that `config.py` reads; no weights, no
address. tests/unit/test_kv_config.py holds each against the published number of parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def _row(
    kind: str,
    layers: int,
    hidden: int,
    heads: tuple[int, int],
    inner: int,
    vocabulary: int,
    context: int,
    **more: Any,
) -> Mapping[str, Any]:
    return {
        "model_type": kind,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "intermediate_size": inner,
        "vocab_size": vocabulary,
        "max_position_embeddings": context,
        "torch_dtype": "bfloat16",
        **more,
    }


PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "llama-2-7b": _row("llama", 32, 4096, (32, 32), 11008, 32000, 4096, torch_dtype="float16"),
    "llama-3.1-8b": _row("llama", 32, 4096, (32, 8), 14336, 128256, 131072),
    "llama-3.1-70b": _row("llama", 80, 8192, (64, 8), 28672, 128256, 131072),
    "llama-3.2-1b": _row(
        "llama", 16, 2048, (32, 8), 8192, 128256, 131072, head_dim=64, tie_word_embeddings=True
    ),
    "mistral-7b-v0.1": _row("mistral", 32, 4096, (32, 8), 14336, 32000, 32768, sliding_window=4096),
    "qwen2.5-7b": _row(
        "qwen2",
        28,
        3584,
        (28, 4),
        18944,
        152064,
        131072,
        use_sliding_window=False,
        sliding_window=131072,
        max_window_layers=28,
    ),
    "smollm2-135m": _row("llama", 30, 576, (9, 3), 1536, 49152, 8192, tie_word_embeddings=True),
}
