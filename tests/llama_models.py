"""Small random models of the Llama family, as folders, and what transformers says to them.

Law: for tests. Everything follows from a seed; weights are large enough that no two logits are nearly equal.
"""

from __future__ import annotations

import warnings
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

BASE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
KINDS: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mha": {"num_key_value_heads": 4},
    "mqa": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "bias": {"attention_bias": True, "mlp_bias": True},
    "wide-heads": {"head_dim": 16},
    "llama3-rope": {"rope_parameters": LLAMA3_ROPE},
    "mistral": {"sliding_window": 24},
    "qwen2": {},
}
CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"


def build(
    folder: Path, kind: str = "gqa", *, seed: int = 0, shards: bool = False, poison: int = -1, **changes: Any
) -> Path:
    """Save a model of this kind with a tokenizer of 256 bytes.

    shards: in several files. poison: token id whose embedding is NaN.
    """
    body = BASE | KINDS[kind] | changes
    model_class, config_class = {
        "mistral": (MistralForCausalLM, MistralConfig),
        "qwen2": (Qwen2ForCausalLM, Qwen2Config),
    }.get(kind, (LlamaForCausalLM, LlamaConfig))
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = model_class(config_class(**body))
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                torch.nn.init.normal_(parameter, std=0.2)
        if poison >= 0:
            model.get_input_embeddings().weight.data[poison] = float("nan")
        model.save_pretrained(folder, max_shard_size="60KB" if shards else "1GB")
    byte_tokenizer(folder)
    return folder


def byte_tokenizer(folder: Path) -> None:
    """A token is a byte, so that characters come in several tokens; with a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT)


def prompt(index: int, length: int) -> tuple[int, ...]:
    """Some token ids."""
    return tuple((index * 31 + 7 * i + 3) % 256 for i in range(length))


@lru_cache(maxsize=4)
def _theirs(folder: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    # Past any end token: with min_new_tokens instead, generate would forbid that token.
    model.generation_config.eos_token_id = None
    return model


def greedy(folder: Path, ids: tuple[int, ...], count: int) -> list[int]:
    """The tokens that transformers' generate makes, fp32, greedy, past any end token."""
    # Tiny matrices are slower with more threads, and far slower on a busy machine.
    torch.set_num_threads(1)
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        text = torch.tensor([ids])
        made = _theirs(folder).generate(
            text,
            attention_mask=torch.ones_like(text),
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )
    return made[0, len(ids) :].tolist()
