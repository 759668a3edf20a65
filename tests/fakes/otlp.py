"""A collector of traces: takes OTLP as JSON over HTTP and keeps it.

Law: lives in a thread of the test, on a port of its own, and dies with its `with` block.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Collector:
    """What came by POST /v1/traces. spans: of all requests, attributes as plain values. received: bytes."""

    def __init__(self) -> None:
        self.bodies: list[Any] = []
        self.received = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                raw = self.rfile.read(int(self.headers["content-length"]))
                assert self.path == "/v1/traces"
                outer.bodies.append(json.loads(raw))
                outer.received += len(raw)
                self.send_response(200)
                self.send_header("content-length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, format: str, *args: Any) -> None:
                """Quiet."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    @contextlib.contextmanager
    def up(self) -> Iterator[Collector]:
        thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()

    @property
    def spans(self) -> list[dict[str, Any]]:
        found = []
        for body in self.bodies:
            for resource in body["resourceSpans"]:
                for scope in resource["scopeSpans"]:
                    found += [span | {"attributes": plain(span["attributes"])} for span in scope["spans"]]
        return found


def plain(rows: list[dict[str, Any]]) -> dict[str, Any]:
    out = {}
    for row in rows:
        [(kind, value)] = row["value"].items()
        out[row["key"]] = int(value) if kind == "intValue" else value
    return out
