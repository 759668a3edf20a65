"""A server's load report, as it stands in a header of its answer.

Law: pure. ORCA's native HTTP forms, TEXT and JSON, in; its named metrics out, those that may go on in a
header of ours. What is no report is none: nobody's answer fails for it. vLLM 0.32 gives one when asked, on
answers that aren't streamed only (entrypoints/openai/completion/api_router.py); an executor always does.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

ASK = {"endpoint-load-metrics-format": "TEXT"}
"""vLLM's way of being asked."""
HEADER = "endpoint-load-metrics"
_NAMED = "named_metrics"
_GOOD = re.compile(r"[A-Za-z0-9_.-]{1,64}")
MOST = 16
"""Names of one report: a header has a limit, and who sends more doesn't mean us."""


def named(headers: Mapping[str, str]) -> dict[str, float]:
    """Its named metrics; empty where there is no report, or none that can be read."""
    form, _, rest = headers.get(HEADER, "").strip().partition(" ")
    if form == "TEXT":
        found = _text(rest)
    elif form == "JSON":
        found = _json(rest)
    else:
        found = {}
    good = {name: value for name, value in found.items() if _GOOD.fullmatch(name) and math.isfinite(value)}
    return dict(list(good.items())[:MOST])


def _text(rest: str) -> dict[str, float]:
    found = {}
    for entry in rest.split(","):
        name, _, number = entry.strip().partition("=")
        kind, _, metric = name.partition(".")
        if kind == _NAMED:
            found[metric] = _number(number)
    return found


def _json(rest: str) -> dict[str, float]:
    try:
        body = json.loads(rest)
    except (ValueError, RecursionError):
        return {}
    metrics = body.get(_NAMED) if isinstance(body, dict) else None
    return {name: _number(value) for name, value in metrics.items()} if isinstance(metrics, dict) else {}


def _number(value: Any) -> float:
    """NaN for what is none."""
    try:
        return math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan
