"""A real Envoy 1.40 reads the executor's load reports: whole answers and streams, into its weights.

Law: one Envoy with a static configuration, one executor, one stub that reports nonsense; all on 127.107.12.x.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from mesh.tools import find
from tests.contract.executor_process import PORT, executor, until

pytestmark = pytest.mark.real

GOOD, BAD, ENVOY = "127.107.12.10", "127.107.12.12", "127.107.12.11"
POLICIES = "envoy.extensions.load_balancing_policies"
NETWORK = "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
READ = "orca_load_report for"
"""What Envoy's router says of a report that it could read."""


def _typed(name: str, **fields: Any) -> dict[str, Any]:
    return {"@type": f"type.googleapis.com/{name}", **fields}


def _cluster(name: str, address: str) -> dict[str, Any]:
    policy = _typed(
        f"{POLICIES}.client_side_weighted_round_robin.v3.ClientSideWeightedRoundRobin",
        blackout_period="0.1s",
        weight_update_period="0.1s",
        metric_names_for_computing_utilization=["named_metrics.kv_cache_usage_perc"],
    )
    where = {"address": {"socket_address": {"address": address, "port_value": PORT}}}
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": "1s",
        "load_balancing_policy": {
            "policies": [{"typed_extension_config": {"name": "weights", "typed_config": policy}}]
        },
        "load_assignment": {
            "cluster_name": name,
            "endpoints": [{"lb_endpoints": [{"endpoint": where}]}],
        },
    }


def _bootstrap() -> dict[str, Any]:
    routes = [
        {"match": {"prefix": "/bad"}, "route": {"cluster": "bad"}},
        {"match": {"prefix": "/"}, "route": {"cluster": "good", "timeout": "0s"}},
    ]
    router = _typed("envoy.extensions.filters.http.router.v3.Router")
    manager = _typed(
        NETWORK,
        stat_prefix="in",
        route_config={"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": routes}]},
        http_filters=[{"name": "envoy.filters.http.router", "typed_config": router}],
    )
    chain = {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
    listener = {
        "name": "in",
        "address": {"socket_address": {"address": ENVOY, "port_value": 8080}},
        "filter_chains": [chain],
    }
    clusters = [_cluster("good", GOOD), _cluster("bad", BAD)]
    return {"static_resources": {"listeners": [listener], "clusters": clusters}}


@contextlib.contextmanager
def _envoy(folder: Path) -> Iterator[Path]:
    """Runs until the block ends; gives its log."""
    config, log = folder / "envoy.json", folder / "envoy.log"
    config.write_text(json.dumps(_bootstrap()), encoding="utf-8")
    levels = ["-l", "error", "--component-log-level", "router:trace"]
    command = [str(find("envoy")), "-c", str(config), "--use-dynamic-base-id", "--concurrency", "1", *levels]
    with log.open("wb") as out:
        process = subprocess.Popen(["setpriv", "--pdeathsig", "KILL", *command], stdout=out, stderr=out)
    try:
        until("Envoy serves", lambda: _get("/v1/models") == 200)
        yield log
    finally:
        process.kill()
        process.wait()


def _get(path: str) -> int:
    try:
        with urllib.request.urlopen(f"http://{ENVOY}:8080{path}", timeout=60) as answer:
            answer.read()
            return int(answer.status)
    except (urllib.error.URLError, ConnectionError):
        return 0


def _post(**body: Any) -> bytes:
    raw = json.dumps({"prompt": "hi", "max_tokens": 5, **body}).encode()
    request = urllib.request.Request(f"http://{ENVOY}:8080/v1/completions", raw)
    with urllib.request.urlopen(request, timeout=60) as answer:
        said: bytes = answer.read()
        return said


class _Nonsense(BaseHTTPRequestHandler):
    """Reports a metric that there isn't, for which Envoy drops the whole report."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("endpoint-load-metrics", "TEXT cpu_utilization=0.5, bogus=1")
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


@contextlib.contextmanager
def _stub() -> Iterator[None]:
    server = HTTPServer((BAD, PORT), _Nonsense)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_envoy_reads_every_report_and_weighs_by_it(tmp_path: Path) -> None:
    with executor(tmp_path, GOOD, "--engine", "sim"), _stub(), _envoy(tmp_path) as log:
        before = log.read_text().count(READ)
        assert b"choices" in _post()
        assert b"[DONE]" in _post(stream=True)
        assert _get("/v1/models") == 200
        until("three reports are read", lambda: log.read_text().count(READ) == before + 3)
        text = log.read_text()
        assert "named_metrics" in text
        assert "kv_cache_usage_perc" in text
        assert "onOrcaLoadReport failed" not in text, "it could read the report and not use it"
        # The proof that a report which it can't read is seen here as such.
        assert _get("/bad") == 200
        until("the nonsense is refused", lambda: "unsupported metric name: bogus" in log.read_text())
        assert log.read_text().count(READ) == before + 3
