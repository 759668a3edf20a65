"""What an answer that is an error means: whose fault it is, and whether another instance may do better.

Law: pure. Status, headers and body in, an EngineFault out. 400, 413, 422: the request can never be served.
429: not now. Everything else is the server's: a wrong key or model is our configuration, never the client's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from services.faults import EngineFault, Refused

CLIENT, BUSY = (400, 413, 422), 429
RETRY_AFTER_S = 1.0
"""Where a server says 429 and not when to come again."""
_TOO_LONG = re.compile(
    r"max_model_len|context (length|size|window)|maximum (input|model|sequence) length", re.IGNORECASE
)
_PYDANTIC = "body."
"""vLLM puts it before the names of fields that have the wrong type."""


def verdict(status: int, headers: Mapping[str, str], body: str) -> EngineFault:
    """The fault that this answer stands for."""
    said = _error(body)
    message = str(said.get("message") or body.strip()[:500] or "no reason given")
    if status in CLIENT:
        param = said.get("param")
        name = param.removeprefix(_PYDANTIC) if isinstance(param, str) else None
        return Refused(400, _code(said, message), message, param=name)
    if status == BUSY:
        code = _word(said.get("code")) or "rate_limited"
        return Refused(429, code, message, retry_after_s=_seconds(headers))
    return EngineFault(f"the server answered {status}: {message}")


def _error(body: str) -> dict[str, Any]:
    """OpenAI's form {"error": {…}}; some servers leave the outer one away, or say a text."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(document, dict):
        return {}
    inner = document.get("error", document)
    return inner if isinstance(inner, dict) else {"message": str(inner)}


def _code(said: Mapping[str, Any], message: str) -> str:
    if _TOO_LONG.search(message):
        return "context_length_exceeded"
    return _word(said.get("code")) or "invalid_request"


def _word(code: Any) -> str:
    """A machine-readable reason; vLLM repeats the status there, which is none."""
    return code if isinstance(code, str) and not code.isdecimal() else ""


def _seconds(headers: Mapping[str, str]) -> float:
    try:
        value = float(headers.get("Retry-After", ""))
    except ValueError:
        return RETRY_AFTER_S
    return value if 0 <= value <= 3600 else RETRY_AFTER_S
