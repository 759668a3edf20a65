"""Trace context of a request in headers: W3C and B3, in and out.

Law: pure, on OpenTelemetry's own propagators; imported by services/telemetry/otel.py alone. Only those are
asked whose headers came: most requests from outside bring none, and asking all of them costs more than the
rest of a span that isn't kept.
"""

from __future__ import annotations

from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.context import Context
from opentelemetry.propagators.b3 import B3MultiFormat, B3SingleFormat
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

PARENT, BAGGAGE, B3, B3_TRACE, B3_SPAN = "traceparent", "baggage", "b3", "x-b3-traceid", "x-b3-spanid"
_SAMPLED, _UNSAMPLED = trace.TraceFlags(trace.TraceFlags.SAMPLED), trace.TraceFlags(trace.TraceFlags.DEFAULT)
_ALL = frozenset({PARENT, BAGGAGE, B3, B3_TRACE})
_W3C, _BAGGAGE = TraceContextTextMapPropagator(), W3CBaggagePropagator()
_B3_SINGLE, _B3_MULTI = B3SingleFormat(), B3MultiFormat()
Ids = tuple[int, int]
"""Of a trace and a span."""


def incoming(carried: Mapping[str, str]) -> Context | None:
    """carried: header names in lower case. None: no context among them. W3C comes last, and so wins, since it
    says more."""
    if _ALL.isdisjoint(carried):
        return None
    context = Context()
    if B3 in carried or B3_TRACE in carried:
        context = _B3_MULTI.extract(_decided(carried), context)
    if PARENT in carried:
        context = _W3C.extract(carried, context)
    if BAGGAGE in carried:
        context = _BAGGAGE.extract(carried, context)
    return context


def parent(came: Context) -> trace.SpanContext | None:
    """Whose child a span of this context is; None where its trace begins here."""
    said = trace.get_current_span(came).get_span_context()
    return said if said.is_valid else None


def context(ids: Ids, parent: trace.SpanContext | None, *, kept: bool) -> trace.SpanContext:
    """What a span is, as its children see it."""
    flags = _SAMPLED if kept else _UNSAMPLED
    return trace.SpanContext(*ids, False, flags, None if parent is None else parent.trace_state)


def traceparent(ids: Ids, kept: bool) -> str:
    return f"00-{ids[0]:032x}-{ids[1]:016x}-{'01' if kept else '00'}"


def outgoing(came: Context, ids: Ids, kept: bool, carried: Mapping[str, str]) -> dict[str, str]:
    """Headers for those that we ask, where a context came: W3C always, B3 in the form in which it came."""
    ours = trace.NonRecordingSpan(context(ids, parent(came), kept=kept))
    told = trace.set_span_in_context(ours, came)
    headers: dict[str, str] = {}
    _W3C.inject(headers, told)
    if BAGGAGE in carried:
        _BAGGAGE.inject(headers, told)
    if B3 in carried:
        _B3_SINGLE.inject(headers, told)
    if B3_TRACE in carried:
        _B3_MULTI.inject(headers, told)
        if B3_SPAN in carried:
            headers["x-b3-parentspanid"] = carried[B3_SPAN]
    return headers


def _decided(carried: Mapping[str, str]) -> dict[str, str]:
    """B3 may leave the decision to us by saying nothing, which the propagator takes for a no."""
    headers = dict(carried)
    if B3_TRACE in headers and "x-b3-flags" not in headers:
        headers.setdefault("x-b3-sampled", "1")
    return headers
