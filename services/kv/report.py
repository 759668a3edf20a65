"""The plan as lines for people and as JSON.

Law: pure; a function of the plan alone, so that goldens can hold it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.kv.plan import Plan, plan
from services.kv.shape import KvShape
from services.kv.sizes import show_size

_FIRST = 1024


def contexts(answer: Plan) -> tuple[Plan, ...]:
    """Plans for 1 K, 2 K, 4 K … tokens: to the model's own limit, or until none fits."""
    found: list[Plan] = []
    tokens = _FIRST
    limit = answer.shape.context or 1 << 20
    while tokens <= limit and (not found or found[-1].sequences):
        found.append(plan(answer.shape, answer.memory, tokens))
        tokens *= 2
    return tuple(found)


def lines(name: str, source: str, answer: Plan, more: Sequence[Plan] = ()) -> list[str]:
    """Words first, then numbers; every size in bytes beside its short form where a machine counts it."""
    rows = [
        ("model", f"{name} ({source})"),
        ("cache", _cache(answer.shape)),
        ("memory", _memory(answer)),
        ("per token", _exact(answer.shape.bytes_per_token)),
        ("per sequence", _sequence(answer)),
        ("keeps", _keeps(answer)),
        ("fits", _fits(answer)),
        ("boundary", _boundary(answer)),
    ]
    if answer.shape.context:
        rows.append(("model's limit", f"{answer.shape.context:,} tokens"))
    text = [f"{label:<14}{value}" for label, value in rows]
    if more:
        text += ["", f"{'context':>12}  {'sequences':>10}  {'per sequence':>12}"]
        text += [f"{p.context:>12,}  {p.sequences:>10,}  {show_size(p.sequence_bytes):>12}" for p in more]
    return text


def as_json(name: str, source: str, answer: Plan, more: Sequence[Plan] = ()) -> dict[str, Any]:
    """Everything in bytes and tokens; null: at no context."""
    shape, memory = answer.shape, answer.memory
    body: dict[str, Any] = {
        "model": name,
        "source": source,
        "shape": shape_json(shape),
        "memory": {
            "total": memory.total,
            "weights": memory.weights,
            "reserve": memory.reserve,
            "for_kv": memory.for_kv,
        },
        "context": answer.context,
        "model_context": shape.context or None,
        "blocks": answer.blocks,
        "pool_bytes": answer.pool_bytes,
        "bytes_per_token": shape.bytes_per_token,
        "bytes_per_sequence": answer.sequence_bytes,
        "memory_ratio": answer.ratio,
        "sequences": answer.sequences,
        "missing_bytes": answer.missing_bytes,
        "longest_sequence": answer.longest,
        "one_less_from": answer.one_less_from,
        "none_from": answer.none_from,
    }
    if more:
        body["contexts"] = [{"context": p.context, "sequences": p.sequences} for p in more]
    return body


def shape_json(shape: KvShape) -> dict[str, Any]:
    return {
        "layers": shape.layers,
        "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "kind": shape.kind,
        "dtype": shape.dtype,
        "block": shape.block,
        "window": shape.pool_window,
        "chunk": shape.chunk,
        "bytes_per_token": shape.bytes_per_token,
    }


def _cache(shape: KvShape) -> str:
    kind = f" ({shape.kind})" if shape.kind else ""
    heads = f"{shape.kv_heads} KV head{'s' if shape.kv_heads > 1 else ''} of {shape.head_dim}{kind}"
    return f"{shape.layers} layers, {heads}, {shape.dtype}, blocks of {shape.block}"


def _memory(answer: Plan) -> str:
    memory = answer.memory
    text = show_size(memory.total)
    if memory.weights:
        text += f" - weights {show_size(memory.weights)}"
    if memory.reserve:
        text += f" - reserve {show_size(memory.reserve)}"
    left = f" = {show_size(memory.for_kv)}" if memory.for_kv != memory.total else ""
    return f"{text}{left} for KV: {answer.blocks:,} block{_s(answer.blocks)}"


def _sequence(answer: Plan) -> str:
    blocks = answer.shape.blocks(answer.context)
    size = _exact(answer.sequence_bytes)
    return f"of {answer.context:,} token{_s(answer.context)}: {size}, {blocks:,} block{_s(blocks)}"


def _keeps(answer: Plan) -> str:
    shape = answer.shape
    if shape.pool_window:
        step = f" and a step of {shape.chunk:,}" if shape.chunk > 1 else ""
        return f"the last {shape.pool_window:,} tokens{step}: {answer.ratio:.3g} of keep-all"
    mixed = [w for w in shape.windows if w]
    if mixed:
        less = show_size(shape.per_layer_bytes(answer.context))
        few = f"{len(mixed)} of {shape.layers} layers have a window"
        return f"all tokens (1.0): {few}, one table serves all; a table per layer would hold {less}"
    return "all tokens (1.0)"


def _fits(answer: Plan) -> str:
    if answer.sequences:
        return f"{answer.sequences:,} sequence{_s(answer.sequences)}"
    return f"none: one lacks {show_size(answer.missing_bytes)}"


def _boundary(answer: Plan) -> str:
    if answer.longest is None:
        return "none: the window bounds every sequence"
    alone = f"from {answer.none_from:,} tokens none (longest: {answer.longest:,})"
    if answer.sequences < 2 or answer.one_less_from is None:
        return alone
    return f"from {answer.one_less_from:,} tokens one less, {alone}"


def _exact(number: int) -> str:
    short = show_size(number)
    return f"{short} ({number:,} bytes)" if not short.endswith(" B") else short


def _s(number: int) -> str:
    return "" if number == 1 else "s"
