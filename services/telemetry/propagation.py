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
_NOTHING = Context()
_W3C, _BAGGAGE = TraceContextTextMapPropagator(), W3CBaggagePropagator()
_B3_SINGLE, _B3_MULTI = B3SingleFormat(), B3MultiFormat()


def incoming(carried: Mapping[str, str]) -> Context:
    """carried: header names in lower case. W3C comes last, and so wins, since it says more."""
    context = _NOTHING
    if _b3(carried):
        context = _B3_MULTI.extract(_decided(carried), context)
    if PARENT in carried:
        context = _W3C.extract(carried, context)
    if BAGGAGE in carried:
        context = _BAGGAGE.extract(carried, context)
    return context


def parent(came: Context) -> trace.SpanContext | None:
    """Whose child a span of this context is; None where its trace begins here."""
    said = trace.get_current_span(came).get_span_context() if came else None
    return said if said and said.is_valid else None


def outgoing(came: Context, ours: trace.SpanContext, carried: Mapping[str, str]) -> dict[str, str]:
    """Headers for those that we ask: W3C always, B3 in the form in which it came."""
    if not came and not _b3(carried):
        return {PARENT: f"00-{ours.trace_id:032x}-{ours.span_id:016x}-{ours.trace_flags:02x}"}
    context = trace.set_span_in_context(trace.NonRecordingSpan(ours), came)
    headers: dict[str, str] = {}
    _W3C.inject(headers, context)
    if BAGGAGE in carried:
        _BAGGAGE.inject(headers, context)
    if B3 in carried:
        _B3_SINGLE.inject(headers, context)
    if B3_TRACE in carried:
        _B3_MULTI.inject(headers, context)
        if B3_SPAN in carried:
            headers["x-b3-parentspanid"] = carried[B3_SPAN]
    return headers


def _b3(carried: Mapping[str, str]) -> bool:
    return B3 in carried or B3_TRACE in carried


def _decided(carried: Mapping[str, str]) -> dict[str, str]:
    """B3 may leave the decision to us by saying nothing, which the propagator takes for a no."""
    headers = dict(carried)
    if B3_TRACE in headers and "x-b3-flags" not in headers:
        headers.setdefault("x-b3-sampled", "1")
    return headers
