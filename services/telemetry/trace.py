"""Spans of requests, as the server sees them; and the trace id in the log.

Law: no OpenTelemetry in here; services/telemetry/otel.py is imported only when the environment asks for
traces. Without it the context that came in is carried on as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from regions.cli.errors import UsageError
from services.caller import REQUEST_ID
from services.telemetry.outgoing import outgoing_headers

Attribute = str | bool | int | float | tuple[str, ...]
ALL, ERRORS = "all", "errors+1%"
MODES: Mapping[str, float] = {ALL: 1.0, ERRORS: 0.01}
"""Sampling mode → share of the traces that begin here and are kept. Errors are kept in both."""
MODE_VARIABLE = "WEIR_TRACE_MODE"
_EXPORTERS = ("otlp", "none", "")


class Span(Protocol):
    """One request. headers: what goes on to whom we ask."""

    @property
    def headers(self) -> Mapping[str, str]: ...

    def set(self, attributes: Mapping[str, Attribute]) -> None: ...

    def end(self, error: str = "") -> None:
        """error: its kind, or empty. Calling it twice is the same as once."""


class Tracing(Protocol):
    """Begins spans. `carried`: the trace headers that came in, lower case."""

    def begin(self, name: str, carried: Mapping[str, str], attributes: Mapping[str, Attribute]) -> Span: ...

    async def close(self) -> None:
        """Send what is left, within a few seconds."""


@dataclass(frozen=True, slots=True)
class Passed:
    """The span of an executor that doesn't trace."""

    headers: Mapping[str, str]

    def set(self, attributes: Mapping[str, Attribute]) -> None:
        """Nobody asks."""

    def end(self, error: str = "") -> None:
        """Nothing began."""


class NoTracing:
    """Carries the context on and records nothing."""

    def begin(self, name: str, carried: Mapping[str, str], attributes: Mapping[str, Attribute]) -> Span:
        return Passed(carried)

    async def close(self) -> None:
        """Nothing is left."""


def from_environment(env: Mapping[str, str], resource: Mapping[str, str]) -> Tracing:
    """As OpenTelemetry's own variables say: on with OTEL_EXPORTER_OTLP_ENDPOINT (or …_TRACES_ENDPOINT) or
    OTEL_TRACES_EXPORTER=otlp, off with OTEL_TRACES_EXPORTER=none or OTEL_SDK_DISABLED=true.

    resource: attributes of this process. Raises UsageError for an exporter or mode that there isn't.
    """
    exporter = env.get("OTEL_TRACES_EXPORTER", "").strip().lower()
    mode = env.get(MODE_VARIABLE, ALL).strip().lower()
    if exporter not in _EXPORTERS:
        raise UsageError(f"OTEL_TRACES_EXPORTER={exporter!r}", "unknown", "otlp or none")
    if mode not in MODES:
        raise UsageError(f"{MODE_VARIABLE}={mode!r}", "unknown", " or ".join(MODES))
    endpoint = env.get("OTEL_EXPORTER_OTLP_ENDPOINT") or env.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    disabled = env.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    if disabled or exporter == "none" or not (endpoint or exporter):
        return NoTracing()
    from services.telemetry.otel import OtelTracing, otlp

    return OtelTracing(otlp(), MODES[mode], resource)


def trace_id(headers: Mapping[str, str]) -> str:
    """32 or 16 hex digits from a set of trace headers, or empty."""
    parent = headers.get("traceparent", "").split("-")
    single = headers.get("b3", "").split("-")
    if len(parent) >= 4:
        return parent[1]
    return single[0] if len(single) >= 2 else headers.get("x-b3-traceid", "")


_MARK = "weir_ids_told"


class TraceIds(logging.Filter):
    """Puts the ids of the request that a line is about at its end: the one that stands in the ingress' access
    log, and its trace's, if it has one. Once, however many handlers have such a filter."""

    def filter(self, record: logging.LogRecord) -> bool:
        if getattr(record, _MARK, False):
            return True
        setattr(record, _MARK, True)
        headers = outgoing_headers()
        ids = {"request_id": headers.get(REQUEST_ID, ""), "trace_id": trace_id(headers)}
        if said := " ".join(f"{name}={value}" for name, value in ids.items() if value):
            record.msg, record.args = f"{record.getMessage()} {said}", ()
        return True


def in_logs() -> None:
    """Ids of requests in every line from now on (once per process, after logging is set up)."""
    for handler in logging.getLogger().handlers:
        if not any(isinstance(one, TraceIds) for one in handler.filters):
            handler.addFilter(TraceIds())
