"""Traces against a small OTLP/JSON collector: context in and out, attributes, sampling, and that nobody
waits."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from random import Random
from typing import Any

import pytest

from regions.cli.errors import UsageError
from services.engine import GenerateRequest
from services.faults import OutOfDeviceMemory
from services.server import Edge
from services.telemetry import genai, otel, outgoing_headers
from services.telemetry.otel import THREAD
from services.telemetry.outgoing import Carrying
from services.telemetry.trace import NoTracing, TraceIds, Tracing, from_environment, trace_id
from tests.fakes.otlp import Collector, plain
from tests.unit.executor import CHAT, CHAT_PATH, TEXT, TEXT_PATH, Running, running
from tests.unit.scripted import Scripted

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
W3C = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1", "baggage": "user=7"}
SINGLE = {"b3": f"{TRACE}-{PARENT}-1"}
MULTI = {"x-b3-traceid": TRACE, "x-b3-spanid": PARENT, "x-b3-sampled": "1"}
DEFERRED = {"x-b3-traceid": TRACE, "x-b3-spanid": PARENT}


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    """It answers, so whatever ended is there once tracing was closed, however slow the machine."""
    monkeypatch.setattr(otel, "CLOSE_S", 60.0)
    with Collector().up() as it:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", it.url)
        yield it


def tracing(collector: Collector, mode: str = "all") -> Tracing:
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "WEIR_TRACE_MODE": mode}
    return from_environment(env, {"service.name": "chat", "service.instance.id": "chat-stable-0"})


class Telling(Scripted):
    """Remembers what it would have to carry to an upstream server, in its own task and by request id."""

    def __init__(self, script: Any) -> None:
        super().__init__(script)
        self.carried: list[Mapping[str, str]] = []

    async def generate(self, request: GenerateRequest) -> Any:
        self.carried.append(outgoing_headers())

        async def elsewhere() -> Mapping[str, str]:
            return outgoing_headers(request.request_id)

        assert await elsewhere() == outgoing_headers()
        async for token in super().generate(request):
            yield token


def traced(
    tracing: Tracing,
    engine: Scripted,
    *asks: tuple[str, dict[str, Any], Mapping[str, str]],
    patience_s: float = 30.0,
) -> list[int]:
    """Ask a server with this tracing; the statuses. patience_s: for what the exporter still has to say."""
    others = exporting()

    async def main() -> list[int]:
        edge = Edge(chance=Random(3), tracing=tracing)
        async with running(engine, edge=edge) as it:
            statuses = [(await _ask(it, path, body, headers)) for path, body, headers in asks]
        await tracing.close()
        return statuses

    statuses = asyncio.run(main())
    for thread in exporting() - others:
        thread.join(patience_s)
    return statuses


def exporting() -> set[threading.Thread]:
    return {it for it in threading.enumerate() if it.name.startswith((THREAD, "OtelBatchSpan"))}


async def _ask(it: Running, path: str, body: dict[str, Any], headers: Mapping[str, str]) -> int:
    async with it.http.post(it.base + path, json=body, headers=headers) as answer:
        await answer.read()
        return answer.status


def test_a_span_says_what_was_asked_and_what_came(collector: Collector) -> None:
    body = CHAT | {"n": 2, "stop": ["zz"], "top_p": 0.5, "stream": True}
    headers = W3C | {"x-weir-tenant": "gold-demo", "x-request-id": "r-1"}
    assert traced(tracing(collector), Scripted(["a", "b"]), (CHAT_PATH, body, headers)) == [200]
    [span] = collector.spans
    assert (span["name"], span["kind"]) == ("chat echo-1", 2)
    assert (span["traceId"], span["parentSpanId"]) == (TRACE, PARENT)
    wanted = {
        genai.OPERATION_NAME: "chat",
        genai.PROVIDER_NAME: "weir",
        genai.REQUEST_MODEL: "echo-1",
        genai.RESPONSE_MODEL: "echo-1",
        genai.REQUEST_MAX_TOKENS: 5,
        genai.REQUEST_SEED: 9,
        genai.REQUEST_TOP_P: 0.5,
        genai.REQUEST_STREAM: True,
        genai.REQUEST_CHOICE_COUNT: 2,
        genai.USAGE_INPUT_TOKENS: 8,
        genai.USAGE_OUTPUT_TOKENS: 4,
        genai.TENANT: "gold-demo",
        genai.REGION: "westeurope",
        genai.STAGE: "canary",
        genai.ENGINE: "scripted",
        genai.REQUEST_ID: "r-1",
        genai.STATUS_CODE: 200,
    }
    assert wanted.items() <= span["attributes"].items()
    assert span["attributes"][genai.RESPONSE_FINISH_REASONS] == {
        "values": [{"stringValue": "stop"}, {"stringValue": "stop"}]
    }
    assert span["attributes"][genai.RESPONSE_TIME_TO_FIRST_CHUNK] >= 0
    resource = plain(collector.bodies[0]["resourceSpans"][0]["resource"]["attributes"])
    assert (resource["service.name"], resource["service.instance.id"]) == ("chat", "chat-stable-0")
    assert "hi" not in json.dumps(collector.bodies), "no prompt in a span"


@pytest.mark.parametrize("headers", [W3C, SINGLE, MULTI, DEFERRED, W3C | MULTI, {"b3": f"{PARENT}-{PARENT}"}])
def test_context_comes_in_and_goes_out_in_its_own_form(collector: Collector, headers: dict[str, str]) -> None:
    engine = Telling(["a"])
    traced(tracing(collector), engine, (TEXT_PATH, TEXT, headers))
    [span] = collector.spans
    [out] = engine.carried
    told = trace_id(headers).rjust(32, "0")
    assert (span["traceId"], span["parentSpanId"]) == (told, PARENT)
    assert out["traceparent"] == f"00-{told}-{span['spanId']}-01"
    if "b3" in headers:
        assert out["b3"] == f"{told}-{span['spanId']}-1"
    if "x-b3-traceid" in headers:
        assert (out["x-b3-traceid"], out["x-b3-spanid"], out["x-b3-sampled"]) == (told, span["spanId"], "1")
        assert out["x-b3-parentspanid"] == PARENT
    if "tracestate" in headers:
        assert (out["tracestate"], out["baggage"]) == ("vendor=1", "user=7")
    assert outgoing_headers() == {}, "nothing is left behind"


@pytest.mark.parametrize("headers", [{"b3": "0"}, {"x-b3-traceid": "nonsense"}, {"traceparent": "00-0-0-01"}])
def test_a_context_that_cannot_be_read_is_overwritten(collector: Collector, headers: dict[str, str]) -> None:
    engine = Telling(["a"])
    traced(tracing(collector), engine, (TEXT_PATH, TEXT, headers))
    [span] = collector.spans
    [out] = engine.carried
    assert "parentSpanId" not in span
    assert out["traceparent"] == f"00-{span['traceId']}-{span['spanId']}-01"
    ours = {"b3": f"{span['traceId']}-{span['spanId']}-1", "x-b3-traceid": span["traceId"]}
    assert {name: out[name] for name in ours if name in headers} == {
        name: value for name, value in ours.items() if name in headers
    }


def test_limits_that_the_environment_sets_are_kept(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "5")
    monkeypatch.setenv("OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT", "4")
    it = tracing(collector)
    span = it.begin("chat echo-1", {}, {f"name-{n}": "too long" for n in range(7)})
    span.end()
    span.set({"late": "lost"})
    asyncio.run(it.close())
    [said] = collector.spans
    assert (said["attributes"], said["droppedAttributesCount"]) == (
        {f"name-{n}": "too " for n in range(2, 7)},
        2,
    )


def test_without_tracing_the_context_is_carried_on_as_it_came() -> None:
    engine = Telling(["a"])
    came = W3C | SINGLE | {"x-request-id": "r-7"}
    traced(NoTracing(), engine, (TEXT_PATH, TEXT, came | {"authorization": "Bearer secret"}))
    assert engine.carried == [came]


def test_a_caller_that_said_no_is_not_traced_unless_it_fails(collector: Collector) -> None:
    off = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
    engine = Telling(["a"])
    traced(tracing(collector), engine, (TEXT_PATH, TEXT, off))
    assert not collector.spans
    assert engine.carried[0]["traceparent"].endswith("-00")
    traced(tracing(collector), Scripted([OutOfDeviceMemory("x")]), (TEXT_PATH, TEXT, off))
    assert [span["status"]["code"] for span in collector.spans] == [2]


def test_errors_and_one_per_cent(collector: Collector) -> None:
    """The one per cent is by trace id, so all services that sample so keep the same traces."""
    good = [(TEXT_PATH, TEXT, {}) for _ in range(400)]
    mistakes: list[Any] = [(TEXT_PATH, {"prompt": 7}, {}) for _ in range(40)]
    traced(tracing(collector, "errors+1%"), Scripted(["a"]), *good, *mistakes)
    broken = Scripted([OutOfDeviceMemory("x")])
    codes = traced(tracing(collector, "errors+1%"), broken, *good[:3])
    failed = [span for span in collector.spans if span.get("status", {}).get("code") == 2]
    kept = [span for span in collector.spans if span not in failed]
    assert [span["attributes"][genai.ERROR_TYPE] for span in failed] == list(map(str, codes))
    assert len(codes) == 3
    assert len(kept) < 20, "about four of four hundred; a mistake of the client is no error of ours"
    limit = round(0.01 * 2**64)
    assert all(int(span["traceId"][16:], 16) < limit for span in kept)


def test_a_collector_that_is_not_there_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the connection and never answers."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as deaf:
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "600")  # ten seconds are over on a busy machine
        others = exporting()
        it = from_environment({"OTEL_EXPORTER_OTLP_ENDPOINT": url}, {})
        asks = [(TEXT_PATH, TEXT, {}) for _ in range(30)]
        assert traced(it, Scripted(["a"]), *asks, patience_s=0.0) == [200] * 30
        ours = exporting() - others
        assert THREAD in {thread.name for thread in ours}, "it was closed before the exporter gave up"
    for thread in ours:
        thread.join(30)
    assert not exporting() & ours, "it tries no more once it was closed"


@pytest.mark.parametrize(
    ("env", "on"),
    [
        ({}, False),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}, False),
        ({"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}, False),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:1/v1/traces"}, True),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
    ],
)
def test_opentelemetrys_own_variables_turn_it_on(env: dict[str, str], on: bool) -> None:
    it = from_environment(env, {})
    assert isinstance(it, NoTracing) is not on
    asyncio.run(it.close())


@pytest.mark.parametrize("env", [{"OTEL_TRACES_EXPORTER": "jaeger"}, {"WEIR_TRACE_MODE": "some"}])
def test_a_setting_that_there_is_not_is_a_usage_error(env: dict[str, str]) -> None:
    with pytest.raises(UsageError):
        from_environment(env, {})


def test_nothing_of_opentelemetry_is_imported_where_nobody_traces() -> None:
    code = "import sys, services.server; print([m for m in sys.modules if m.startswith('opentelemetry')])"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=True)
    assert done.stdout.strip() == "[]"


def test_the_names_are_those_of_the_installed_conventions() -> None:
    from opentelemetry.semconv._incubating.attributes import gen_ai_attributes as theirs

    ours = {name: value for name, value in vars(genai).items() if str(value).startswith("gen_ai.")}
    assert len(ours) > 10
    for name, value in ours.items():
        assert getattr(theirs, f"GEN_AI_{name}") == value


def test_log_lines_of_a_request_end_with_its_trace_id(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("weir.test")
    # Twice, as where a process has two handlers: one record passes both. Pytest's handler lives on.
    with caplog.filtering(TraceIds()), caplog.filtering(TraceIds()):
        with Carrying(W3C, ("job-1",)):
            log.warning("out of %s", "memory")
            assert outgoing_headers("job-1") == W3C
        with Carrying({"x-request-id": "r-1"}, ()):
            log.warning("100%")
        log.warning("later")
    assert [record.getMessage() for record in caplog.records if record.name == log.name] == [
        f"out of memory trace_id={TRACE}",
        "100% request_id=r-1",
        "later",
    ]
    assert outgoing_headers("job-1") == {}
