"""The control plane's own page: /metrics for Prometheus, /healthz for a supervisor, /state for people.

Law: read only; shows no key, no token, no certificate body.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST


class Page:
    """An HTTP server on one address. ready(): "" or what is still missing."""

    def __init__(
        self, where: str, registry: CollectorRegistry, ready: Callable[[], str], state: Callable[[], Any]
    ) -> None:
        self._host, _, port = where.rpartition(":")
        self._port, self._registry, self._ready, self._state = int(port), registry, ready, state
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/healthz", self._health)
        app.router.add_get("/state", self._show)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, self._host, self._port).start()

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(
            body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )

    async def _health(self, _: web.Request) -> web.Response:
        """200 once a first snapshot was served; 503 with what is missing before."""
        missing = self._ready()
        return web.Response(status=503 if missing else 200, text=(missing or "ready") + "\n")

    async def _show(self, _: web.Request) -> web.Response:
        return web.json_response(self._state(), dumps=lambda body: json.dumps(body, indent=2, sort_keys=True))
