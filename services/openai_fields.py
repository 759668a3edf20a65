"""Typed fields of a request body: present and of the right kind, or refused by name.

Law: pure. A field that is null counts as absent, as in OpenAI's API.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

INT64 = 2**63
TOO_MANY, OVER = 429, 408
"""Too many requests; the request's own time is over."""


class ApiError(Exception):
    """An error in OpenAI's form. status: HTTP status; param: the field at fault, if one is; code: stable and
    machine-readable; retry_after_s: when to come back, 0: nothing said.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float = 0.0,
    ) -> None:
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after_s = retry_after_s
        super().__init__(message)

    def body(self) -> bytes:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        if self.status == TOO_MANY:
            # Nothing is wrong with the request: who sorts errors by their type is to try again.
            kind = "rate_limit_error"
        elif self.status == OVER:
            kind = "timeout_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return json.dumps({"error": error}).encode()


def document(raw: bytes) -> dict[str, Any]:
    """The JSON object in `raw`. Raises ApiError (400): no JSON, NaN or Infinity in it, too deep, no
    object."""
    try:
        body = json.loads(raw, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise ApiError(400, "the body is not JSON") from None
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    return body


def _no_constant(name: str) -> NoReturn:
    # Python reads NaN, JSON doesn't have it, and it would compare false with every limit.
    raise ValueError(f"{name} is not JSON")


def typed(body: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kind):
        raise ApiError(400, f"{name} must be of type {kind.__name__}", name)
    return value


def whole(body: Mapping[str, Any], name: str, low: int, high: int) -> int | None:
    """An integer from low to high; None when absent."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise ApiError(400, f"{name} must be an integer", name)
    if not low <= value <= high:
        raise ApiError(400, f"{name} must be between {low} and {high}", name)
    return value


def number(body: Mapping[str, Any], name: str, low: float, high: float) -> float | None:
    """A number from low to high; None when absent."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ApiError(400, f"{name} must be a number between {low:g} and {high:g}", name)
    return float(value)
