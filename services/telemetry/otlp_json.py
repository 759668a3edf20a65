"""Spans as OTLP's JSON, in a fifth of the time that OpenTelemetry's own encoder takes for ours.

Law: pure. Gives what `encode_spans` gives for the spans of an executor: without events and links, attributes
of services/telemetry/trace.py's type, all of one resource. A test holds the two against each other.

Theirs makes an object per value, then a dictionary, then text: 85 µs a span, a fifth of what a short request
costs altogether, and under the interpreter's lock that the requests want.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from json.encoder import encode_basestring_ascii as quoted

from opentelemetry.exporter.otlp.json.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan

from services.telemetry.trace import Attribute

_KIND_OF_NONE, _HAS_REMOTE, _REMOTE = 1, 256, 512
"""OTLP's numbers: kinds are one above the API's; the two flags that say whether the parent is remote."""


def body(spans: Sequence[ReadableSpan]) -> bytes:
    """Of one POST. Raises IndexError for no spans."""
    return f"{_frame(spans[0])}{','.join(map(_span, spans))}]}}]}}]}}".encode()


def _frame(span: ReadableSpan) -> str:
    """What stands before the spans: resource and scope, as their encoder tells them."""
    [resource] = encode_spans([span]).to_dict()["resourceSpans"]
    [scope] = resource.pop("scopeSpans")
    del scope["spans"]
    return f'{{"resourceSpans":[{json.dumps(resource)[:-1]},"scopeSpans":[{json.dumps(scope)[:-1]},"spans":['


def _span(span: ReadableSpan) -> str:
    """Flags, then what every span has, then what only some have."""
    context, parent, status = span.context, span.parent, span.status
    flags = _HAS_REMOTE | (_REMOTE if parent is not None and parent.is_remote else 0)
    said = ""
    if context.trace_state:
        said += f',"traceState":{quoted(_state(context.trace_state))}'
    if parent is not None:
        said += f',"parentSpanId":"{parent.span_id:016x}"'
    if span.attributes:
        said += f',"attributes":[{_attributes(span.attributes)}]'
    if span.dropped_attributes:
        said += f',"droppedAttributesCount":{span.dropped_attributes}'
    told = [f'"message":{quoted(status.description)}'] if status.description else []
    told += [f'"code":{status.status_code.value}'] if status.status_code.value else []
    return (
        f'{{"traceId":"{context.trace_id:032x}","spanId":"{context.span_id:016x}","flags":{flags}'
        f',"name":{quoted(span.name)},"kind":{span.kind.value + _KIND_OF_NONE}'
        f',"startTimeUnixNano":"{span.start_time}","endTimeUnixNano":"{span.end_time}"'
        f'{said},"status":{{{",".join(told)}}}}}'
    )


def _state(state: Mapping[str, str]) -> str:
    return ",".join(f"{key}={value}" for key, value in state.items())


def _attributes(attributes: Mapping[str, Attribute]) -> str:
    return ",".join([f'{{"key":{quoted(name)},"value":{_value(it)}}}' for name, it in attributes.items()])


def _value(it: Attribute) -> str:
    if isinstance(it, str):
        return f'{{"stringValue":{quoted(it)}}}'
    if isinstance(it, bool):  # before int, which it is too
        return f'{{"boolValue":{"true" if it else "false"}}}'
    if isinstance(it, int):
        return f'{{"intValue":"{it}"}}'
    if isinstance(it, float):
        return f'{{"doubleValue":{_double(it)}}}'
    values = f'"values":[{",".join(map(_value, it))}]' if it else ""
    return f'{{"arrayValue":{{{values}}}}}'


def _double(it: float) -> str:
    if math.isfinite(it):
        return repr(it)
    return '"NaN"' if it != it else '"Infinity"' if it > 0 else '"-Infinity"'
