"""The ingress as its clients see it: protocols, names, sessions, streams, certificates, log, status.

Law: standard clients only (ssl, http.client, urllib, curl), through the real ingress of the shared world.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import shutil
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator, Mapping
from email.message import Message
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import trustme

from drills.load import ATTEMPTS_HEADER
from mesh.catalog import load_services
from mesh.xds.names import METADATA_HEADER, SESSION_COOKIE
from tests.e2e.mesh_world import CANARY, MeshWorld

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

HERE = "us-east-1"
MODELS = "/chat/v1/models"
CHAT = {"messages": [{"role": "user", "content": "how deep is the water"}], "max_tokens": 5}


def _tls(world: MeshWorld) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(world.world.ca_file))


@contextlib.contextmanager
def _line(world: MeshWorld, region: str = HERE) -> Iterator[http.client.HTTPSConnection]:
    """A kept-alive HTTP/1.1 connection to the ingress of a region."""
    at = urlsplit(world.world.address(region).ingress_https)
    assert at.hostname is not None
    line = http.client.HTTPSConnection(at.hostname, at.port, timeout=30, context=_tls(world))
    with contextlib.closing(line):
        yield line


def _ask(
    line: http.client.HTTPSConnection,
    path: str,
    headers: Mapping[str, str] | None = None,
    body: Mapping[str, Any] | None = None,
) -> tuple[int, Message, bytes]:
    raw = None if body is None else json.dumps(body).encode()
    line.request("GET" if raw is None else "POST", path, raw, dict(headers or {}))
    answer = line.getresponse()
    return answer.status, answer.headers, answer.read()


def test_an_openai_client_needs_nothing_but_the_base_url(calm: MeshWorld) -> None:
    base_url = calm.world.address(HERE).ingress_https + "/chat/v1"
    request = urllib.request.Request(
        f"{base_url}/chat/completions",
        data=json.dumps(CHAT).encode(),
        headers={"Authorization": "Bearer none", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, context=_tls(calm), timeout=30) as answer:
        body = json.load(answer)
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"]["role"] == "assistant"
    assert len(body["choices"][0]["message"]["content"].split()) == 5
    assert body["usage"]["completion_tokens"] == 5
    with urllib.request.urlopen(f"{base_url}/models", context=_tls(calm), timeout=30) as answer:
        assert json.load(answer)["data"][0]["id"] == body["model"]


def test_a_service_is_reached_by_path_and_by_host(calm: MeshWorld) -> None:
    with _line(calm) as line:
        assert _ask(line, MODELS)[0] == 200
        for host in ("chat.example.org", "chat.anything", "chat.example.org:8443"):
            assert _ask(line, "/v1/models", {"Host": host})[0] == 200, host
        for path, host in (("/v1/models", "other.example.org"), ("/chatter/v1/models", "x"), ("/", "x")):
            status, _, body = _ask(line, path, {"Host": host})
            assert status == 404
            assert "no service has this path" in json.loads(body)["error"]["message"]


def test_a_stream_passes_unbuffered_and_outlives_the_first_byte_timeout(calm: MeshWorld) -> None:
    spec = next(s for s in load_services(Path(calm.world.spec.services_dir)) if s.name == "chat")
    # At 1 ms a token: at least four times the timeout. A pause of a busy machine must not look like a buffer.
    tokens = round(spec.first_byte_timeout_s * 1000 * 4)
    with _line(calm) as line:
        start = time.monotonic()
        body = {"prompt": "deep", "max_tokens": tokens, "stream": True}
        line.request("POST", "/chat/v1/completions", json.dumps(body).encode())
        answer = line.getresponse()
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.readline().startswith(b"data: ")
        first = time.monotonic() - start
        rest = answer.read().strip()
        whole = time.monotonic() - start
    events = [e for e in rest.split(b"\n\n") if e.startswith(b"data: ")]
    assert events[-1] == b"data: [DONE]"
    assert len(events) == tokens  # the first was read, [DONE] is one more
    assert whole > spec.first_byte_timeout_s, "too short to prove anything"
    assert first < whole / 2, "the stream was held back"


def test_http2_is_offered_and_works(calm: MeshWorld) -> None:
    at = urlsplit(calm.world.address(HERE).ingress_https)
    context = _tls(calm)
    for offer, chosen in ((["h2", "http/1.1"], "h2"), (["http/1.1"], "http/1.1")):
        context.set_alpn_protocols(offer)
        with (
            socket.create_connection((at.hostname, at.port), timeout=10) as plain,
            context.wrap_socket(plain, server_hostname=at.hostname) as line,
        ):
            assert line.selected_alpn_protocol() == chosen


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl on this machine")
@pytest.mark.parametrize(("option", "version"), [("--http1.1", "1.1"), ("--http2", "2")])
def test_curl_speaks_both_versions_also_for_streams(calm: MeshWorld, option: str, version: str) -> None:
    body = json.dumps({"prompt": "deep", "max_tokens": 20, "stream": True})
    url = calm.world.address(HERE).ingress_https + "/chat/v1/completions"
    trust = ("--cacert", str(calm.world.ca_file))
    done = subprocess.run(
        ["curl", "-sSN", option, *trust, "-d", body, "-w", "\n%{http_version} %{http_code}", url],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == f"{version} 200"
    assert done.stdout.count("data: ") == 21


def test_the_session_cookie_keeps_a_session(calm: MeshWorld) -> None:
    calm.put(HERE, CANARY, "0.5")
    calm.applied(0.5)
    owners: dict[str, set[str]] = {}
    with contextlib.ExitStack() as stack:
        lines = [stack.enter_context(_line(calm, region)) for region in calm.names]
        for number in range(40):
            session = f"{SESSION_COOKIE}=cookie-{number}"
            for turn in range(6):
                cookie = f"theme=dark; {session}; lang=en" if turn % 2 else session
                status, headers, _ = _ask(lines[turn % len(lines)], MODELS, {"Cookie": cookie})
                assert status == 200
                # One that stood still on a busy machine is passed over: that is another tale.
                if headers[ATTEMPTS_HEADER] == "1":
                    owners.setdefault(session, set()).add(headers[METADATA_HEADER])
    assert len(owners) == 40
    assert all(len(colours) == 1 for colours in owners.values()), "a session changed its colour"
    assert len(set.union(*owners.values())) >= 4, "sessions are spread over regions and stages"


def test_who_trusts_somebody_else_does_not_connect(calm: MeshWorld) -> None:
    url = calm.world.address(HERE).ingress_https + MODELS
    stranger = ssl.create_default_context()
    trustme.CA().configure_trust(stranger)
    for context in (ssl.create_default_context(), stranger):
        with pytest.raises(urllib.error.URLError) as caught:
            urllib.request.urlopen(url, context=context, timeout=10)
        assert isinstance(caught.value.reason, ssl.SSLCertVerificationError)


def test_the_access_log_is_json_with_region_and_stage(calm: MeshWorld) -> None:
    agent = f"weir-test-{uuid.uuid4()}"
    with _line(calm) as line:
        _, headers, _ = _ask(line, MODELS, {"User-Agent": agent, "x-weir-dye": "canary"})
        _ask(line, "/nowhere", {"User-Agent": agent})
    log = calm.world.layout.region(HERE).log("ingress")

    def lines() -> list[str]:
        """Without the last one, which Envoy may be writing: it flushes in pieces that end anywhere."""
        return log.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]

    def written() -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = [json.loads(row) for row in lines() if agent in row]
        return rows if len(rows) == 2 else []

    answered, refused = calm.until("Envoy has flushed its log", written, 60.0)
    colour = f"region={answered['region']};stage={answered['stage']}"
    assert headers[METADATA_HEADER] == colour == answered["colour"]
    assert (answered["stage"], answered["dye"], answered["service"]) == ("canary", "canary", "chat")
    assert (answered["status"], answered["method"], answered["path"]) == (200, "GET", MODELS)
    assert answered["request_id"] == headers["x-request-id"]
    assert (refused["status"], refused["region"], refused["stage"]) == (404, None, None)
    others = [row for row in lines() if row.startswith("{")]
    assert all(isinstance(json.loads(row), dict) for row in others)


NUMBER = (int, float)
STAGES = {"stable": {"instances": int, "healthy": int}, "canary": {"instances": int, "healthy": int}}
REGION = {"ready": bool, "consul": str, "ingress": str, "ca_file": str, "services": {"chat": STAGES}}
APPLIED = {"applied": bool, "acknowledged": int, "connected": int, "refusal": (str, type(None))}


def _shape(names: tuple[str, ...]) -> dict[str, Any]:
    """Issue 2, "Interfaces that other tools rely on": every key, with the types of its values."""
    traffic = {
        "canary_weight": {"value": NUMBER, "key": str},
        "regions": dict.fromkeys(names, NUMBER),
        "evacuated": list,
        "per_region": dict.fromkeys(names, APPLIED),
        "observed": {"canary": NUMBER, "regions": dict.fromkeys(names, NUMBER), "requests": int},
    }
    return {"schema_version": int, "regions": dict.fromkeys(names, REGION), "traffic": {"chat": traffic}}


MORE = {"admin", "metrics", "supervisor", "processes", "error", "resting"}
"""Keys of a region that weir adds of its own."""


def _mismatches(value: Any, shape: Any, path: str = "$") -> Iterator[str]:
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            yield f"{path} is no object"
            return
        extra = set(value) - set(shape) - (MORE if shape is REGION else set())
        wrong = {"missing": set(shape) - set(value), "unknown": extra}
        yield from (f"{path}.{key}: {what}" for what, keys in wrong.items() for key in keys)
        for key in set(shape) & set(value):
            yield from _mismatches(value[key], shape[key], f"{path}.{key}")
    elif not isinstance(value, shape) or (isinstance(value, bool) and shape is not bool):
        yield f"{path} is {value!r}"


def test_status_has_the_keys_that_other_tools_rely_on(calm: MeshWorld) -> None:
    calm.put(HERE, CANARY, "0.15")
    calm.applied(0.15)
    calm.load(100, 4)

    def observed() -> Any:
        body = calm.weir("status", "--json").json
        seen = body["traffic"]["chat"]["observed"]
        return body if seen["requests"] and len(seen["regions"]) == len(calm.names) else None

    body = calm.until("traffic is observed in all regions", observed, 40.0)
    assert not list(_mismatches(body, _shape(calm.names)))
    assert body["schema_version"] == 1
    traffic = body["traffic"]["chat"]
    assert traffic["canary_weight"] == {"value": 0.15, "key": CANARY}
    assert sum(traffic["regions"].values()) == pytest.approx(1.0)
    for name in calm.names:
        assert body["regions"][name]["ready"] is True
        assert body["regions"][name]["consul"].startswith("http://")
        assert body["regions"][name]["ingress"].startswith("https://")
        assert Path(body["regions"][name]["ca_file"]).is_file()
        assert traffic["per_region"][name] == {
            "applied": True,
            "acknowledged": 1,
            "connected": 1,
            "refusal": None,
        }


def test_the_shape_check_finds_what_is_wrong() -> None:
    good = {"ready": True, "consul": "", "ingress": "", "ca_file": "", "services": {"chat": {}}}
    assert "$.services.chat.stable: missing" in set(_mismatches(good, REGION))
    assert set(_mismatches({"value": True, "key": None, "x": 1}, {"value": NUMBER, "key": str})) == {
        "$.value is True",
        "$.key is None",
        "$.x: unknown",
    }
