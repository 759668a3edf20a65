"""vLLM's own metrics: what of them an executor tells of itself.

Law: pure. Prometheus text in, figures out. Names are those of vLLM 0.32; a name that is not there is a zero,
since a server of another version may have renamed it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

_SUMS: Mapping[str, str] = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:generation_tokens_total": "tokens",
    "vllm:num_preemptions_total": "preemptions",
}
_SHARES: Mapping[str, str] = {
    "vllm:kv_cache_usage_perc": "kv_used",
    # Before 0.11.
    "vllm:gpu_cache_usage_perc": "kv_used",
}
_CACHE = "vllm:cache_config_info"
_WANTED = (*_SUMS, *_SHARES, _CACHE)


@dataclass(frozen=True, slots=True)
class Figures:
    """Of all engines of one server (data-parallel ones are summed; of KV use the highest counts). tokens and
    the like: since its start. kv_tokens, kv_block: size of its KV cache, 0 where it doesn't say."""

    running: int = 0
    waiting: int = 0
    kv_used: float = 0.0
    tokens: int = 0
    prompt_tokens: int = 0
    preemptions: int = 0
    kv_tokens: int = 0
    kv_block: int = 0


def figures(text: str) -> Figures:
    """Raises ValueError for what is no Prometheus text."""
    sums = dict.fromkeys(_SUMS.values(), 0.0)
    kv_used, kv_tokens, kv_block = 0.0, 0, 0
    for family in text_string_to_metric_families(_only_wanted(text)):
        for sample in family.samples:
            if sample.name in _SUMS:
                sums[_SUMS[sample.name]] += sample.value
            elif sample.name in _SHARES:
                kv_used = max(kv_used, sample.value)
            elif sample.name == _CACHE:
                kv_block = _whole(sample.labels.get("block_size"))
                blocks = _whole(sample.labels.get("num_gpu_blocks"))
                kv_tokens += _whole(sample.labels.get("kv_cache_size_tokens")) or blocks * kv_block
    counts = {name: int(value) for name, value in sums.items()}
    return Figures(**counts, kv_used=min(1.0, kv_used), kv_tokens=kv_tokens, kv_block=kv_block)


def _only_wanted(text: str) -> str:
    """The few lines that are looked at: parsing all of them every second would be felt."""
    return "".join(f"{line}\n" for line in text.splitlines() if line.startswith(_WANTED))


def _whole(text: str | None) -> int:
    return int(text) if text is not None and text.isdecimal() else 0
