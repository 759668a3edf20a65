"""What the text of a KV value means, and why it is refused.

Law: pure. Bytes in, a value or ValueRefused out; the reason is written for the person who typed the value.
Rules: ../shared/DESIGN.md, "KV layout".
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping

MAX_BYTES = 512 * 1024
_NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?\Z")


class ValueRefused(ValueError):
    """The value is not taken; the text says why and what would be."""


def _text(raw: bytes) -> str:
    if len(raw) > MAX_BYTES:
        raise ValueRefused(f"{len(raw)} bytes; a value may have {MAX_BYTES} at most")
    try:
        text = raw.decode("utf-8").strip()
    except UnicodeDecodeError:
        raise ValueRefused("not UTF-8 text") from None
    if not text:
        raise ValueRefused("empty; delete the key to return to the default")
    return text


def _shown(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")


def parse_canary(raw: bytes) -> float:
    """A fraction in [0, 1]. Raises ValueRefused."""
    text = _text(raw)
    if not _NUMBER.match(text):
        raise ValueRefused(f"{_shown(text)} is not a number; wanted a fraction in [0, 1] such as 0.15")
    value = float(text)
    if not math.isfinite(value) or not 0.0 <= value <= 1.0:
        hint = f"; for {value:g} % write {value / 100:g}" if 1.0 < value <= 100.0 else ""
        raise ValueRefused(f"{_shown(text)} is outside [0, 1]{hint}")
    return value


def _json(text: str, wanted: str) -> object:
    def no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
        names = [name for name, _ in pairs]
        twice = sorted({n for n in names if names.count(n) > 1})
        if twice:
            raise ValueRefused(f"{twice} stands there twice")
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=no_duplicates)
    except (json.JSONDecodeError, RecursionError):
        raise ValueRefused(f"{_shown(text)} is not JSON; wanted {wanted}") from None


def _unknown(names: Collection[str], known: Collection[str]) -> None:
    strange = sorted(set(names) - set(known))
    if strange:
        raise ValueRefused(f"unknown region {', '.join(strange)}; known: {', '.join(sorted(known))}")


def parse_shares(raw: bytes, known: Collection[str]) -> Mapping[str, float]:
    """Shares by region, adding up to 1; a region that is not named gets 0. Raises ValueRefused."""
    wanted = 'an object such as {"cn-north-1": 70, "us-east-1": 30}'
    body = _json(_text(raw), wanted)
    if not isinstance(body, dict) or not body:
        raise ValueRefused(f"wanted {wanted}")
    _unknown(body, known)
    weights: dict[str, float] = {}
    for name, weight in body.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
            raise ValueRefused(f"weight of {name} is not a number: {_shown(json.dumps(weight))}")
        if weight < 0:
            raise ValueRefused(f"weight of {name} is negative: {weight}")
        weights[name] = float(weight)
    total = sum(weights.values())
    if not math.isfinite(total) or total <= 0:
        raise ValueRefused(
            "the weights of all regions are zero" if total == 0 else "the weights are too large"
        )
    return {name: weights.get(name, 0.0) / total for name in sorted(known)}


def parse_evacuated(raw: bytes, known: Collection[str]) -> tuple[str, ...]:
    """Regions that take no new requests, sorted. Raises ValueRefused, also when none would be left."""
    wanted = 'a list such as ["cn-north-1"]'
    body = _json(_text(raw), wanted)
    if not isinstance(body, list) or not all(isinstance(name, str) for name in body):
        raise ValueRefused(f"wanted {wanted}")
    _unknown(body, known)
    if set(body) >= set(known):
        raise ValueRefused("all regions would be evacuated; at least one must take traffic")
    return tuple(sorted(set(body)))


def check(key: str, raw: bytes, known: Collection[str]) -> None:
    """Raise ValueRefused unless `raw` may stand under the config key `key` ("config/traffic/…")."""
    parts = key.split("/")
    name = parts[-1]
    if len(parts) in (3, 4) and name == "canary-weight":
        parse_canary(raw)
    elif len(parts) == 4 and name == "regions":
        parse_shares(raw, known)
    elif len(parts) == 4 and name == "evacuated":
        parse_evacuated(raw, known)
    else:
        raise ValueRefused(
            "no such setting; there are config/traffic/canary-weight and "
            "config/traffic/<service>/{canary-weight,regions,evacuated}"
        )
