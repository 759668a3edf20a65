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
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, TraceIdRatioBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from mesh.clock import Clock, SystemClock
from services.caller import REQUEST_ID
from services.telemetry import genai
from services.telemetry.trace import Attribute

CLOSE_S = 2.0
THREAD = "weir-traces"
_NO_CONTEXT = {REQUEST_ID}
_W3C = CompositePropagator([TraceContextTextMapPropagator(), W3CBaggagePropagator()])
# The later one wins where both came: W3C says more.
_INCOMING = CompositePropagator([B3MultiFormat(), TraceContextTextMapPropagator(), W3CBaggagePropagator()])


def otlp() -> SpanExporter:
    """JSON over HTTP: the protobuf exporters break beside xds-protos, which ships an old
    opentelemetry.proto."""
    return OTLPSpanExporter()


class _Ids(RandomIdGenerator):  # type: ignore[misc]
    """Random, but for a span that was told to others under its id before it was made."""

    told: tuple[int, int] | None = None

    def generate_trace_id(self) -> int:
        return self.told[0] if self.told else int(super().generate_trace_id())

    def generate_span_id(self) -> int:
        return self.told[1] if self.told else int(super().generate_span_id())


class OtelSpan:
    """A Span. Nothing of OpenTelemetry's is made before its end, and then only if somebody wants it."""

    __slots__ = ("_attributes", "_began", "_came", "_home", "_ids", "_kept", "_name", "headers")

    def __init__(self, home: OtelTracing, name: str, carried: Mapping[str, str]) -> None:
        self._home: OtelTracing | None = home
        self._name, self._began = name, home.now_ns()
        self._came = (
            _INCOMING.extract(_decided(carried), context=Context()) if _traced(carried) else Context()
        )
        parent = trace.get_current_span(self._came).get_span_context()
        self._ids = home.new_ids(parent)
        self._kept = bool(parent.trace_flags.sampled) if parent.is_valid else home.chosen(self._ids[0])
        self._attributes: dict[str, Attribute] = {}
        self.headers = {**carried, **_outgoing(self._came, self._ids, self._kept, carried)}

    def set(self, attributes: Mapping[str, Attribute]) -> None:
        self._attributes.update(attributes)

    def end(self, error: str = "") -> None:
        home, self._home = self._home, None
        if home is not None and (self._kept or error):
            home.export(self._name, self._came, self._ids, self._began, self._attributes, error)


class OtelTracing:
    """share: of the traces that begin here, the part that is kept; a caller's own decision comes first.
    Errors are always exported: the choice is made when a span ends."""

    def __init__(
        self, exporter: SpanExporter, share: float, resource: Mapping[str, str], clock: Clock | None = None
    ) -> None:
        self._clock, self._made, self._exporter = clock or SystemClock(), _Ids(), exporter
        self._provider = TracerProvider(
            sampler=ALWAYS_ON,
            resource=Resource.create(resource),
            shutdown_on_exit=False,
            id_generator=self._made,
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("weir.executor")
        self._bound = TraceIdRatioBased.get_bound_for_rate(share)

    def begin(self, name: str, carried: Mapping[str, str], attributes: Mapping[str, Attribute]) -> OtelSpan:
        span = OtelSpan(self, name, carried)
        span.set(attributes)
        return span

    def now_ns(self) -> int:
        return int(self._clock.time() * 1e9)

    def new_ids(self, parent: trace.SpanContext) -> tuple[int, int]:
        """Of a trace (the parent's, where there is one) and of a span in it."""
        trace_id = parent.trace_id if parent.is_valid else self._made.generate_trace_id()
        return trace_id, self._made.generate_span_id()

    def chosen(self, trace_id: int) -> bool:
        # By the trace's id, as OpenTelemetry's own sampler does: whoever samples the same share keeps the
        # same.
        return bool(trace_id & TraceIdRatioBased.TRACE_ID_LIMIT < self._bound)

    def export(
        self,
        name: str,
        came: Context,
        ids: tuple[int, int],
        began_ns: int,
        attributes: Mapping[str, Attribute],
        error: str,
    ) -> None:
        """Hand one span that has ended to the exporter's queue."""
        self._made.told = ids
        try:
            span = self._tracer.start_span(name, came, trace.SpanKind.SERVER, attributes, start_time=began_ns)
        finally:
            self._made.told = None
        if error:
            span.set_attribute(genai.ERROR_TYPE, error)
            span.set_status(trace.Status(trace.StatusCode.ERROR, error))
        span.end(self.now_ns())

    async def close(self) -> None:
        # In a thread that nobody waits for long: a collector that never answers holds the exporter for 10 s.
        closing = threading.Thread(target=self._provider.shutdown, name=THREAD, daemon=True)
        closing.start()
        await asyncio.to_thread(closing.join, CLOSE_S)
        if closing.is_alive():
            self._exporter.shutdown()  # no further try: the thread ends with the one under way


def _traced(carried: Mapping[str, str]) -> bool:
    """Whether there is a context to read: most requests from outside have none."""
    return not carried.keys() <= _NO_CONTEXT


def _decided(carried: Mapping[str, str]) -> dict[str, str]:
    """B3 may leave the decision to us by saying nothing, which the propagator takes for a no."""
    headers = dict(carried)
    if "x-b3-traceid" in headers and "x-b3-flags" not in headers:
        headers.setdefault("x-b3-sampled", "1")
    return headers


def _outgoing(came: Context, ids: tuple[int, int], kept: bool, carried: Mapping[str, str]) -> dict[str, str]:
    """W3C always; B3 in the form in which it came."""
    flags = trace.TraceFlags(trace.TraceFlags.SAMPLED if kept else trace.TraceFlags.DEFAULT)
    state = trace.get_current_span(came).get_span_context().trace_state
    told = trace.SpanContext(*ids, False, flags, state)
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
