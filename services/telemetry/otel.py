"""Traces by OpenTelemetry: W3C and B3 in and out, sampling, export in the background.

Law: imported only when traces are asked for (services/telemetry/trace.py). A request never waits for an
exporter: spans go into a bounded queue, and what doesn't fit is dropped. No prompt and no answer ever stands
in a span.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence

from opentelemetry import trace
from opentelemetry.attributes import BoundedAttributes
from opentelemetry.exporter.otlp.json.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import TraceIdRatioBased
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from mesh.clock import Clock, SystemClock
from services.telemetry import genai, otlp_json, propagation
from services.telemetry.trace import Attribute

CLOSE_S = 2.0
THREAD = "weir-traces"
_SAMPLED = trace.TraceFlags(trace.TraceFlags.SAMPLED)
_UNSAMPLED = trace.TraceFlags(trace.TraceFlags.DEFAULT)
_NO_ERROR = trace.Status(trace.StatusCode.UNSET)
_SCOPE = InstrumentationScope("weir.executor")


class _Exporter(OTLPSpanExporter):  # type: ignore[misc]
    """OpenTelemetry's own (its settings, connection, retries), with an encoder that costs less."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        if self._shutdown:
            return SpanExportResult.FAILURE
        sent = self._client.export(otlp_json.body(spans)).success
        return SpanExportResult.SUCCESS if sent else SpanExportResult.FAILURE


def otlp() -> SpanExporter:
    """JSON over HTTP: the protobuf exporters break beside xds-protos, which ships an old
    opentelemetry.proto."""
    return _Exporter()


class OtelSpan:
    """A Span. What OpenTelemetry exports is made at its end, and only if somebody wants it.

    ours: what others are told that it is. parent: None where the trace begins here.
    """

    __slots__ = ("_home", "attributes", "began_ns", "headers", "name", "ours", "parent")

    def __init__(
        self, home: OtelTracing, name: str, carried: Mapping[str, str], attributes: Mapping[str, Attribute]
    ) -> None:
        self._home: OtelTracing | None = home
        self.name, self.began_ns, self.attributes = name, home.now_ns(), dict(attributes)
        came = propagation.incoming(carried)
        self.parent = propagation.parent(came)
        self.ours = home.child(self.parent)
        self.headers = {**carried, **propagation.outgoing(came, self.ours, carried)}

    def set(self, attributes: Mapping[str, Attribute]) -> None:
        if self._home is not None:  # once it has ended they are the exporter's thread's
            self.attributes.update(attributes)

    def end(self, error: str = "") -> None:
        home, self._home = self._home, None
        if home is not None and (error or self.ours.trace_flags.sampled):
            home.export(self, error)


class OtelTracing:
    """share: of the traces that begin here, the part that is kept; a caller's own decision comes first.
    Errors are always exported: the choice is made when a span ends.

    So a span is made when it ends, in one piece, and goes straight to OpenTelemetry's queue: its Tracer would
    make one that can be changed until then, which takes five times as long.
    """

    def __init__(
        self, exporter: SpanExporter, share: float, resource: Mapping[str, str], clock: Clock | None = None
    ) -> None:
        self._clock, self._ids, self._exporter = clock or SystemClock(), RandomIdGenerator(), exporter
        self._resource, self._limits = Resource.create(resource), SpanLimits()
        self._queue = BatchSpanProcessor(exporter)
        self._bound = TraceIdRatioBased.get_bound_for_rate(share)

    def begin(self, name: str, carried: Mapping[str, str], attributes: Mapping[str, Attribute]) -> OtelSpan:
        return OtelSpan(self, name, carried, attributes)

    def child(self, parent: trace.SpanContext | None) -> trace.SpanContext:
        """A span in its parent's trace, and kept if that is; where there is none, in a trace of its own."""
        span_id = self._ids.generate_span_id()
        if parent is not None:
            flags = _SAMPLED if parent.trace_flags.sampled else _UNSAMPLED
            return trace.SpanContext(parent.trace_id, span_id, False, flags, parent.trace_state)
        trace_id = self._ids.generate_trace_id()
        # By the trace's id, as OpenTelemetry's own sampler does: whoever samples the same share keeps the
        # same.
        chosen = trace_id & TraceIdRatioBased.TRACE_ID_LIMIT < self._bound
        return trace.SpanContext(trace_id, span_id, False, _SAMPLED if chosen else _UNSAMPLED)

    def export(self, it: OtelSpan, error: str) -> None:
        """Hand one span that has ended to the exporter's queue."""
        attributes, status = it.attributes, _NO_ERROR
        if error:
            attributes[genai.ERROR_TYPE] = error
            status = trace.Status(trace.StatusCode.ERROR, error)
        ours = trace.SpanContext(it.ours.trace_id, it.ours.span_id, False, _SAMPLED, it.ours.trace_state)
        self._queue.on_end(
            ReadableSpan(
                it.name,
                ours,
                it.parent,
                self._resource,
                self._bounded(attributes),
                kind=trace.SpanKind.SERVER,
                status=status,
                start_time=it.began_ns,
                end_time=self.now_ns(),
                instrumentation_scope=_SCOPE,
            )
        )

    def _bounded(self, attributes: dict[str, Attribute]) -> Mapping[str, Attribute]:
        """Within the limits that OpenTelemetry's variables set. Ours are few and of the right types, so
        mostly there is nothing to look at."""
        most, longest = self._limits.max_span_attributes, self._limits.max_span_attribute_length
        if longest is None and (most is None or len(attributes) <= most):
            return attributes
        bounded: Mapping[str, Attribute] = BoundedAttributes(most, attributes, max_value_len=longest)
        return bounded

    def now_ns(self) -> int:
        return int(self._clock.time() * 1e9)

    def flush(self) -> None:
        """Send what has ended so far. Blocks until the collector has it: not for the loop's thread."""
        self._queue.force_flush()

    async def close(self) -> None:
        # In a thread that nobody waits for long: a collector that never answers holds the exporter for 10 s.
        closing = threading.Thread(target=self._queue.shutdown, name=THREAD, daemon=True)
        closing.start()
        await asyncio.to_thread(closing.join, CLOSE_S)
        if closing.is_alive():
            self._exporter.shutdown()  # no further try: the thread ends with the one under way
