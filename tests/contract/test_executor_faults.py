"""A real executor under what clients and operators do to it: nonsense, vanishing, SIGTERM and kill -9 with
streams open."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.contract.executor_process import PORT, Executor, executor, until
from tests.sse import events

pytestmark = pytest.mark.real

IP = "127.107.14.10"
SIM = ("--engine", "sim", "--option", "step_ms=10")
TEXT = b'{"prompt": "hi", "max_tokens": 2}'
LOST = (http.client.IncompleteRead, ConnectionError)


@pytest.fixture(scope="module")
def it(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Executor]:
    with executor(tmp_path_factory.mktemp("executor"), IP, *SIM) as made:
        yield made


def metric(it: Executor, name: str) -> float:
    """The sum of a metric's samples."""
    _, text = it.ask("GET", "/metrics")
    lines = [line for line in text.splitlines() if line.startswith((name + "{", name + " "))]
    assert lines, name
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def raw(it: Executor, said: bytes, *, end: bool) -> bytes:
    """Say this on a new connection; all that comes back. end: say no more afterwards."""
    with socket.create_connection((it.ip, PORT), timeout=30) as line:
        # A server may reset the connection of who talks nonsense, also while it still talks.
        with contextlib.suppress(ConnectionError):
            line.sendall(said)
        if end:
            line.shutdown(socket.SHUT_WR)
        found = b""
        with contextlib.suppress(ConnectionError):
            while part := line.recv(65536):
                found += part
        return found


def post(body: bytes, head: bytes = b"") -> bytes:
    start = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + head
    return start + b"Content-Length: %d\r\n\r\n" % len(body) + body


NONSENSE: dict[str, tuple[bytes, bytes]] = {
    "no HTTP": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"400"),
    "half a request": (b"POST /v1/completions HT", b""),
    "half a body": (post(TEXT).replace(b"Length: 33", b"Length: 300"), b""),
    "two lengths": (post(TEXT, b"Content-Length: 5\r\n"), b"400"),
    "length and chunks": (post(TEXT, b"Transfer-Encoding: chunked\r\n"), b"400"),
    "a chunk that is none": (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\nhi\r\n",
        b"400",
    ),
    "a header of 64 kB": (post(TEXT, b"X-A: " + b"a" * 65536 + b"\r\n"), b"400"),
    "a key in a broken line": (post(TEXT, b"Authorization Bearer sk-secret\r\n"), b"400"),
    "no UTF-8": (post(b'{"prompt": "\xff\xfe"}'), b"400"),
    "no JSON": (post(b"{"), b"400"),
    "NaN": (post(b'{"prompt": "hi", "temperature": NaN}'), b"400"),
    "too deep": (post(b'{"a":' * 100_000), b"400"),
    "a number of a million digits": (post(b'{"max_tokens": ' + b"9" * 1_000_000 + b"}"), b"400"),
    "n of 1000": (post(b'{"prompt": "hi", "n": 1000}'), b"400"),
    "a stop of nothing": (post(b'{"prompt": "hi", "stop": ""}'), b"400"),
    "longer than the context": (post(b'{"prompt": "%s"}' % (b"deep " * 20_000)), b"400"),
    "more than can be kept": (post(b'{"prompt": "%s"}' % (b"x" * (8 << 20))), b"413"),
    "an unknown model": (post(b'{"model": "gpt-9", "prompt": "hi"}'), b"404"),
    "a wrong method": (b"DELETE /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", b"405"),
    "a header that is no deadline": (post(TEXT, b"x-weir-deadline-ms: soon\r\n"), b"200"),
    "a surrogate in the prompt": (post(b'{"prompt": "\\ud800", "max_tokens": 2}'), b"200"),
    "more after the end": (post(TEXT) + post(TEXT), b"400"),
}


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_is_refused_and_leaves_nothing(it: Executor, name: str) -> None:
    said, status = NONSENSE[name]
    answer = raw(it, said, end=not status)  # who says no more is a client that left
    assert answer.split(b" ", 2)[1:2] == ([status] if status else []), answer[:300]
    assert (it.get("/health"), it.get("/ready")) == (200, 200)
    until("nothing is in flight", lambda: it.running() == 0.0)
    assert it.ask("POST", "/v1/completions", json.loads(TEXT))[0] == 200
    log = it.log.read_text()
    assert "Traceback" not in log
    assert "sk-secret" not in log


def test_a_client_that_leaves_gives_back_slot_and_kv(it: Executor) -> None:
    streams = [it.stream(max_tokens=3000) for _ in range(3)]
    for stream in streams:
        stream.take(2)
    assert metric(it, "vllm:num_requests_running") == 3
    assert metric(it, "vllm:kv_cache_usage_perc") > 0
    for stream in streams:
        stream.close()
    for name in ("vllm:num_requests_running", "vllm:kv_cache_usage_perc", "weir_executor_in_flight"):
        until(f"{name} is back to zero", lambda name=name: metric(it, name) == 0.0)
    assert "Traceback" not in it.log.read_text()


def test_sigterm_tells_long_answers_at_the_deadline_why(tmp_path: Any) -> None:
    with (
        executor(tmp_path, "127.107.14.11", *SIM, "--drain-deadline-s", "0.5") as it,
        ThreadPoolExecutor(1) as aside,
    ):
        whole = aside.submit(raw, it, post(b'{"prompt": "hi", "max_tokens": 3000}'), end=False)
        until("it is in flight", lambda: it.running() == 1)
        long = it.stream(max_tokens=3000)
        long.take(1)
        it.signal(signal.SIGTERM)
        with pytest.raises(http.client.IncompleteRead) as cut:
            long.rest()
        *tokens, last = events(long.seen + cut.value.partial)
        error = {"message": "this instance is shutting down", "type": "server_error", "param": None}
        assert json.loads(last) == {"error": error | {"code": "shutting_down"}}
        assert "[DONE]" not in tokens
        head, _, body = whole.result().partition(b"\r\n\r\n")
        assert (head.split(b" ", 2)[1], json.loads(body)["error"]["code"]) == (b"503", "shutting_down")
        assert b"retry-after: 1\r\n" in head.lower()
        assert it.ended() == 0
        assert "2 requests in flight" in it.log.read_text()


def test_kill_9_with_many_streams_is_seen_by_all_of_them(tmp_path: Any) -> None:
    with executor(tmp_path, "127.107.14.12", *SIM) as it:
        streams = [it.stream(max_tokens=3000, n=2) for _ in range(4)]
        for stream in streams:
            stream.take(2)
        it.signal(signal.SIGKILL)
        for stream in streams:
            with pytest.raises(LOST):
                stream.rest()
        assert it.ended() == -signal.SIGKILL
    with executor(tmp_path, "127.107.14.12", *SIM) as again:
        assert again.ask("POST", "/v1/completions", json.loads(TEXT))[0] == 200, "the address is free again"
