"""Traces by OpenTelemetry: W3C and B3 in and out, sampling, export in the background.

Law: imported only when traces are asked for (services/telemetry/trace.py). A request never waits for an
exporter: spans go into a bounded queue, and what doesn't fit is dropped. No prompt and no answer ever stands
in a span.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.json.http.trace_exporter import OTLPSpanExporter
from opentelemetry.propagators.b3 import B3MultiFormat, B3SingleFormat
from opentelemetry.propagators.composite import CompositePropagator
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, TraceIdRatioBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from services.telemetry import genai
from services.telemetry.trace import Attribute

CLOSE_S = 2.0
_KEPT = "weir.kept"
"""Attribute of a span that is exported whatever becomes of it."""
_W3C = CompositePropagator([TraceContextTextMapPropagator(), W3CBaggagePropagator()])
# The later one wins where both came: W3C says more.
_INCOMING = CompositePropagator([B3MultiFormat(), TraceContextTextMapPropagator(), W3CBaggagePropagator()])


def otlp() -> SpanExporter:
    """JSON over HTTP: the protobuf exporters break beside xds-protos, which ships an old
    opentelemetry.proto."""
    return OTLPSpanExporter()


class OtelSpan:
    """A Span. `kept`: exported even if all goes well."""

    def __init__(self, span: trace.Span, headers: Mapping[str, str]) -> None:
        self._span, self.headers = span, headers

    def set(self, attributes: Mapping[str, Attribute]) -> None:
        self._span.set_attributes(attributes)

    def end(self, error: str = "") -> None:
        if error:
            self._span.set_attribute(genai.ERROR_TYPE, error)
            self._span.set_status(trace.Status(trace.StatusCode.ERROR, error))
        self._span.end()


class OtelTracing:
    """share: of the traces that begin here, the part that is kept; a caller's own decision comes first.
    Errors are always exported: every span is recorded, and the choice is made when it ends."""

    def __init__(self, exporter: SpanExporter, share: float, resource: Mapping[str, str]) -> None:
        self._provider = TracerProvider(
            sampler=ALWAYS_ON, resource=Resource.create(resource), shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(_Chosen(exporter)))
        self._tracer = self._provider.get_tracer("weir.executor")
        self._bound = TraceIdRatioBased.get_bound_for_rate(share)

    def begin(self, name: str, carried: Mapping[str, str], attributes: Mapping[str, Attribute]) -> OtelSpan:
        came = _INCOMING.extract(_decided(carried), context=Context())
        span = self._tracer.start_span(name, came, trace.SpanKind.SERVER, attributes)
        parent = trace.get_current_span(came).get_span_context()
        here = span.get_span_context()
        kept = parent.trace_flags.sampled if parent.is_valid else self._chosen(here.trace_id)
        span.set_attribute(_KEPT, kept)
        return OtelSpan(span, {**carried, **_outgoing(came, here, kept, carried)})

    def _chosen(self, trace_id: int) -> bool:
        # By the trace's id, as OpenTelemetry's own sampler does: whoever samples the same share keeps the
        # same.
        return bool(trace_id & TraceIdRatioBased.TRACE_ID_LIMIT < self._bound)

    async def close(self) -> None:
        # A thread that nobody waits for: with no collector there, the exporter tries on for many seconds.
        closing = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        closing.start()
        await asyncio.to_thread(closing.join, CLOSE_S)


class _Chosen(SpanExporter):  # type: ignore[misc]
    """Lets errors and chosen spans through."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter

    def export(self, spans: tuple[ReadableSpan, ...]) -> SpanExportResult:
        wanted = [one for one in spans if _wanted(one)]
        return self._exporter.export(wanted) if wanted else SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return bool(self._exporter.force_flush(timeout_millis))


def _wanted(span: ReadableSpan) -> bool:
    return span.status.status_code is trace.StatusCode.ERROR or bool((span.attributes or {}).get(_KEPT))


def _decided(carried: Mapping[str, str]) -> dict[str, str]:
    """B3 may leave the decision to us by saying nothing, which the propagator takes for a no."""
    headers = dict(carried)
    if "x-b3-traceid" in headers and "x-b3-flags" not in headers:
        headers.setdefault("x-b3-sampled", "1")
    return headers


def _outgoing(
    came: Context, here: trace.SpanContext, kept: bool, carried: Mapping[str, str]
) -> dict[str, str]:
    """W3C always; B3 in the form in which it came."""
    flags = trace.TraceFlags(trace.TraceFlags.SAMPLED if kept else trace.TraceFlags.DEFAULT)
    told = trace.SpanContext(here.trace_id, here.span_id, False, flags, here.trace_state)
    context = trace.set_span_in_context(trace.NonRecordingSpan(told), came)
    headers: dict[str, str] = {}
    _W3C.inject(headers, context)
    if "b3" in carried:
        B3SingleFormat().inject(headers, context)
    if "x-b3-traceid" in carried:
        B3MultiFormat().inject(headers, context)
        if "x-b3-spanid" in carried:
            headers["x-b3-parentspanid"] = carried["x-b3-spanid"]
    return headers
