"""Headers that a request to an upstream server must carry: trace context and request id.

Law: one context variable. Async generators run in the context of who drives them, so an engine that is called
from a handler's own task finds its request's headers; one that works in a task of its own asks by request id.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar, Token
from types import MappingProxyType

_NONE: Mapping[str, str] = MappingProxyType({})
_current: ContextVar[Mapping[str, str]] = ContextVar("weir_outgoing_headers", default=_NONE)
_by_request: dict[str, Mapping[str, str]] = {}


def outgoing_headers(request_id: str = "") -> Mapping[str, str]:
    """Of this request id if it is under way here, else of the current context. Empty outside of a request."""
    return _by_request.get(request_id) or _current.get()


class Carrying:
    """`with Carrying(headers, ids): …` — what is called inside carries these headers on."""

    __slots__ = ("_headers", "_ids", "_token")

    def __init__(self, headers: Mapping[str, str], request_ids: tuple[str, ...]) -> None:
        self._headers, self._ids = MappingProxyType(dict(headers)), request_ids
        self._token: Token[Mapping[str, str]] | None = None

    def __enter__(self) -> None:
        self._token = _current.set(self._headers)
        _by_request.update(dict.fromkeys(self._ids, self._headers))

    def __exit__(self, *_: object) -> None:
        if self._token is not None:
            _current.reset(self._token)
        for one in self._ids:
            _by_request.pop(one, None)
