"""The GPU bench without a GPU: which cases, how long each part may take, and rows from what was measured.

Law: pure; no torch, no clock but the one given. tests/unit/test_gpu_bench.py holds all of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drills.bench_rows import from_mapping

NAME = "gpu"
TOTAL_S = 270.0
"""Of the five minutes that the script may take; the rest is for start and for writing the file."""

SECTIONS: Mapping[str, float] = {"device": 20, "attention": 55, "decode": 65, "memory": 60, "weights": 70}
"""Section → seconds, in the order that they run. What one leaves over, the next ones may use."""

LLAMA_1B: Mapping[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 16,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
"""The shape of a published model of 1.24 billion weights; the weights themselves are random."""
TINY: Mapping[str, Any] = {
    **LLAMA_1B,
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 211,
    "max_position_embeddings": 512,
}

CLAIM_LAUNCH = 0.58
"""S13: launch overhead 42 % lower."""
CLAIM_FRAGMENTATION: Mapping[int, tuple[float, float]] = {16: (18.7, 9.2), 32: (24.3, 11.5)}
"""S13: batch → per cent of reserved memory that nothing uses, before and after."""
CLAIM_WAKE = 39.0
"""S8: a wake is so many times faster than a cold start (1.82 s and 47 ms)."""


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """Causal self-attention of `batch` sequences of `tokens`, as in a prefill. backward: the gradient too."""

    batch: int
    tokens: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    backward: bool = True

    @property
    def name(self) -> str:
        return f"{self.batch} x {self.tokens}, {self.heads}/{self.kv_heads} heads of {self.head_dim}"

    def flops(self, *, backward: bool) -> float:
        """Multiply-adds times 2 of QK and PV over the causal half; the gradient costs 2.5 times as much."""
        forward = 4.0 * self.batch * self.heads * self.tokens * self.tokens * self.head_dim / 2
        return forward * 2.5 if backward else forward

    @property
    def math_bytes(self) -> int:
        """What the scores alone take where they are written out: float32, twice with their softmax."""
        return 2 * 4 * self.batch * self.heads * self.tokens * self.tokens


def attention_cases(*, tiny: bool) -> tuple[AttentionCase, ...]:
    if tiny:
        return (AttentionCase(1, 64, 4, 2, 16), AttentionCase(2, 33, 4, 4, 16))
    return (
        AttentionCase(1, 2048),
        AttentionCase(4, 2048),
        AttentionCase(16, 1024),
        AttentionCase(1, 8192),
        AttentionCase(1, 4096, kv_heads=32),
    )


def decode_batches(*, tiny: bool) -> tuple[int, ...]:
    return (1, 3) if tiny else (1, 8, 16, 32)


def churn(batch: int, steps: int, longest: int, number: Callable[[int, int], int]) -> list[list[int]]:
    """Lengths of the sequences that come into each of `batch` places, one after the other.

    A place's sequence of `length` tokens stays for as many steps as it has tokens to make (a quarter of its
    length), so that memory is asked for and given back in many sizes. number(low, high): a seeded die.
    """
    places = []
    for _ in range(batch):
        lengths, spent = [], 0
        while spent <= steps:
            lengths.append(number(max(4, longest // 16), longest))
            spent += stay(lengths[-1])
        places.append(lengths)
    return places


def stay(length: int) -> int:
    """Steps that a sequence of this prompt runs."""
    return max(1, length // 4)


class OutOfTime(Exception):
    """This part's seconds are over; what was measured until then stays."""


@dataclass(slots=True)
class Deadline:
    """Until when a section may go on."""

    until: float
    now: Callable[[], float]

    @property
    def left_s(self) -> float:
        return self.until - self.now()

    def check(self, need_s: float = 0.0) -> None:
        """Raises OutOfTime unless `need_s` more seconds are there."""
        if self.left_s <= need_s:
            raise OutOfTime(f"{need_s:.1f} s wanted, {max(0.0, self.left_s):.1f} s left")


class Budget:
    """Seconds of the whole run, shared out to sections; what is saved is there for those behind."""

    def __init__(
        self, now: Callable[[], float], total_s: float = TOTAL_S, sections: Mapping[str, float] = SECTIONS
    ) -> None:
        self._now, self._end, self._sections = now, now() + total_s, dict(sections)
        self._scale = min(1.0, total_s / sum(sections.values())) if sections else 1.0

    def open(self, section: str) -> Deadline:
        """Its deadline: all that is left but what the sections behind it are owed."""
        names = list(self._sections)
        behind = sum(self._sections[name] for name in names[names.index(section) + 1 :]) * self._scale
        return Deadline(self._end - behind, self._now)


@dataclass(frozen=True, slots=True)
class Spread:
    """Of repeated timings, in their own unit. Of nothing: NaN."""

    mean: float
    p50: float
    p99: float
    count: int


def spread(values: Sequence[float]) -> Spread:
    ordered = sorted(values)
    mean = sum(ordered) / len(ordered) if ordered else math.nan
    return Spread(mean, quantile(ordered, 0.5), quantile(ordered, 0.99), len(ordered))


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value that `share` of the ordered values don't exceed; NaN of nothing."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


def row(
    metric: str,
    value: float | None,
    unit: str,
    *,
    peer: str = "",
    peer_value: float | None = None,
    goal: str = "",
    claim: str = "",
    note: str = "",
) -> dict[str, Any]:
    """One row, checked and completed (ratio, met) like those of the other benches. claim: the figure of
    SYSTEMS.md beside it, in words. A value without a meaning here is None, and `note` says why; then there is
    no goal either."""
    body = {"bench": NAME, "metric": metric, "value": value, "unit": unit}
    body |= {"peer": peer, "peer_value": peer_value, "goal": goal if value is not None else ""}
    made = from_mapping(body).as_json()
    return made | {key: text for key, text in (("claim", claim), ("note", note)) if text}


def failed(section: str, error: BaseException) -> dict[str, Any]:
    """The row that a section leaves when it broke off; it meets no goal."""
    text = f"{type(error).__name__}: {error}".splitlines()[0][:500]
    return from_mapping({"bench": NAME, "metric": section, "unit": "", "error": text}).as_json()


def fragmentation(allocated: int, reserved: int) -> float | None:
    """Per cent of what the allocator holds that nothing uses; None where it holds nothing."""
    return 100.0 * (reserved - allocated) / reserved if reserved > 0 else None


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Short, for the end of the output: what a lease's reply still shows."""
    lines = []
    for it in rows:
        value = it.get("error") or _short(it["value"], it["unit"])
        line = f"{it['metric']:<58} {value}"
        if it.get("peer"):
            line += f" | {it['peer']}: {_short(it['peer_value'], it['unit'])}"
        if it.get("ratio") is not None:
            line += f" | ratio {it['ratio']:.3g}"
        if it.get("goal"):
            line += f" | {it['goal']}: {'met' if it['met'] else 'NOT MET'}"
        lines.append(line + (f" | {it['note']}" if it.get("note") else ""))
    return "\n".join(lines)


def _short(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:.4g} {unit}".rstrip()
