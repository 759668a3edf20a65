"""A real executor that traces: as the environment says, flushed when it ends, trace ids in its log."""

from __future__ import annotations

import http.client
import json
import signal
from pathlib import Path

import pytest

from services.telemetry import genai
from tests.contract.executor_process import PORT, executor, until
from tests.fakes.otlp import Collector

pytestmark = pytest.mark.real

IP = "127.107.15.10"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CONTEXT = {"traceparent": f"00-{TRACE}-{PARENT}-01"}


def _ask(ip: str, **body: object) -> int:
    line = http.client.HTTPConnection(ip, PORT, timeout=30)
    try:
        line.request("POST", "/v1/completions", json.dumps({"prompt": "hi", **body}), CONTEXT)
        answer = line.getresponse()
        answer.read()
        return answer.status
    finally:
        line.close()


def test_spans_of_the_last_moment_are_sent_when_the_process_ends(tmp_path: Path) -> None:
    fails = ("--engine", "sim", "--option", "nan_after=3")
    with Collector().up() as collector:
        env = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_BSP_SCHEDULE_DELAY": "60000"}
        with executor(tmp_path, IP, *fails, env=env) as it:
            assert (_ask(IP, max_tokens=2), _ask(IP, max_tokens=9)) == (200, 503)
            until("the fault is logged with its trace", lambda: f"trace_id={TRACE}" in it.log.read_text())
            it.signal(signal.SIGTERM)
            assert it.ended() == 0
        # Sent is what stands in the socket; the collector may still be reading it.
        until("both spans are there", lambda: len(collector.spans) >= 2)
        spans = collector.spans
        assert [span["attributes"][genai.STATUS_CODE] for span in spans] == [200, 503]
        assert {(span["traceId"], span["parentSpanId"]) for span in spans} == {(TRACE, PARENT)}
        assert [span["status"].get("code") for span in spans] == [None, 2]


def test_a_collector_that_is_away_delays_no_end(tmp_path: Path) -> None:
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.107.15.12:4318"}
    with executor(tmp_path, "127.107.15.11", env=env) as it:
        assert _ask("127.107.15.11", max_tokens=2) == 200
        it.signal(signal.SIGTERM)
        assert it.ended() == 0


def test_a_mode_that_there_is_not_is_a_usage_error(tmp_path: Path) -> None:
    env = {"OTEL_TRACES_EXPORTER": "otlp", "WEIR_TRACE_MODE": "everything"}
    with executor(tmp_path, "127.107.15.13", env=env, wait=False) as it:
        assert it.ended() == 2
        assert "WEIR_TRACE_MODE" in it.log.read_text()
