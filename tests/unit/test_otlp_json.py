"""Our encoder against OpenTelemetry's own: the same JSON for every span that an executor can make."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry import trace
from opentelemetry.attributes import BoundedAttributes
from opentelemetry.exporter.otlp.json.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from services.telemetry.otlp_json import body

TEXT = st.text(max_size=12)
VALUES = TEXT | st.booleans() | st.integers() | st.floats() | st.lists(TEXT, max_size=3).map(tuple)
ATTRIBUTES = st.dictionaries(TEXT.filter(bool), VALUES, max_size=5)
SPAN_IDS = st.integers(1, 2**64 - 1)
STATES = st.sampled_from([None, trace.TraceState([("vendor", "1"), ("other", "a;b")])])
STATUSES = st.sampled_from([trace.StatusCode.UNSET, trace.StatusCode.OK]).map(trace.Status) | st.builds(
    trace.Status, st.just(trace.StatusCode.ERROR), TEXT
)
RESOURCE = Resource.create({"service.name": 'spans":[ "x"', "weir.stage": "stable"}, "https://schema")


@st.composite
def contexts(draw: st.DrawFn) -> trace.SpanContext:
    trace_id, flags = draw(st.integers(1, 2**128 - 1)), trace.TraceFlags(draw(st.integers(0, 1)))
    return trace.SpanContext(trace_id, draw(SPAN_IDS), draw(st.booleans()), flags, draw(STATES))


@st.composite
def made(draw: st.DrawFn) -> ReadableSpan:
    plain = draw(ATTRIBUTES)
    most = draw(st.sampled_from([None, 1]))
    return ReadableSpan(
        draw(TEXT.filter(bool)),
        draw(contexts()),
        draw(st.none() | contexts()),
        RESOURCE,
        plain if most is None else BoundedAttributes(most, plain, max_value_len=3),
        kind=draw(st.sampled_from(list(trace.SpanKind))),
        status=draw(STATUSES),
        start_time=draw(st.integers(1, 2**63)),
        end_time=draw(st.integers(1, 2**63)),
        instrumentation_scope=InstrumentationScope("weir.executor"),
    )


@settings(max_examples=50)
@given(st.lists(made(), min_size=1, max_size=3))
def test_the_same_as_opentelemetrys_own_encoder(spans: list[ReadableSpan]) -> None:
    assert json.loads(body(spans)) == json.loads(encode_spans(spans).to_json())
