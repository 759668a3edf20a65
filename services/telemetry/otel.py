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
from opentelemetry.attributes import BoundedAttributes
from opentelemetry.exporter.otlp.json.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import TraceIdRatioBased
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from mesh.clock import Clock, SystemClock
from services.telemetry import genai, propagation
from services.telemetry.trace import Attribute

CLOSE_S = 2.0
THREAD = "weir-traces"
_LOW: int = TraceIdRatioBased.TRACE_ID_LIMIT
_NO_ERROR = trace.Status(trace.StatusCode.UNSET)
_SCOPE = InstrumentationScope("weir.executor")


def otlp() -> SpanExporter:
    """JSON over HTTP: the protobuf exporters break beside xds-protos, which ships an old
    opentelemetry.proto."""
    return OTLPSpanExporter()


class OtelSpan:
    """A Span. What OpenTelemetry exports is made at its end, and only if somebody wants it.

    parent: None where its trace begins here. kept: whether it is exported also without an error. The mappings
    that come as attributes are taken as they are and must not change.
    """

    __slots__ = ("_home", "_parts", "began_ns", "headers", "ids", "kept", "name", "parent")

    def __init__(
        self, home: OtelTracing, name: str, carried: Mapping[str, str], attributes: Mapping[str, Attribute]
    ) -> None:
        self._home: OtelTracing | None = home
        self.name, self.began_ns, self._parts = name, home.now_ns(), [attributes]
        came = propagation.incoming(carried)
        self.parent = parent = None if came is None else propagation.parent(came)
        self.ids = ids = home.new_ids(parent)
        self.kept = kept = home.chosen(ids[0]) if parent is None else bool(parent.trace_flags.sampled)
        if came is None:
            self.headers = {**carried, propagation.PARENT: propagation.traceparent(ids, kept)}
        else:
            self.headers = {**carried, **propagation.outgoing(came, ids, kept, carried)}

    @property
    def attributes(self) -> dict[str, Attribute]:
        return {name: value for part in self._parts for name, value in part.items()}

    def set(self, attributes: Mapping[str, Attribute]) -> None:
        self._parts.append(attributes)

    def end(self, error: str = "") -> None:
        home, self._home = self._home, None
        if home is not None and (self.kept or error):
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
        self._clock, self._made, self._exporter = clock or SystemClock(), RandomIdGenerator(), exporter
        self._resource, self._limits = Resource.create(resource), SpanLimits()
        self._queue = BatchSpanProcessor(exporter)
        self._bound: int = TraceIdRatioBased.get_bound_for_rate(share)

    def begin(self, name: str, carried: Mapping[str, str], attributes: Mapping[str, Attribute]) -> OtelSpan:
        return OtelSpan(self, name, carried, attributes)

    def new_ids(self, parent: trace.SpanContext | None) -> tuple[int, int]:
        """Of a trace (the parent's, where there is one) and of a span in it."""
        trace_id = self._made.generate_trace_id() if parent is None else parent.trace_id
        return trace_id, self._made.generate_span_id()

    def chosen(self, trace_id: int) -> bool:
        # By the trace's id, as OpenTelemetry's own sampler does: whoever samples the same share keeps the
        # same.
        return trace_id & _LOW < self._bound

    def export(self, it: OtelSpan, error: str) -> None:
        """Hand one span that has ended to the exporter's queue."""
        attributes, status = it.attributes, _NO_ERROR
        if error:
            attributes[genai.ERROR_TYPE] = error
            status = trace.Status(trace.StatusCode.ERROR, error)
        ours = propagation.context(it.ids, it.parent, kept=True)
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
