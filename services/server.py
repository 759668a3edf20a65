"""The executor's HTTP server: OpenAI's endpoints, health, metrics.

Law: one request in, one answer out; what tokens come is the engine's, whether we may serve is the
instance's. No gRPC and no protobuf in here: nine of these start on two cores.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from mesh.clock import Clock
from services.completions import BAD, MAX_BODY, Completions, Edge, refusal
from services.instance import Instance
from services.openai_api import ApiError

__all__ = ["MAX_BODY", "Edge", "Server"]

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    """Routes of one instance. debug: also `/echo`, which shows the headers that arrived."""

    def __init__(
        self, instance: Instance, clock: Clock, *, debug: bool = False, edge: Edge | None = None
    ) -> None:
        self._it, self._debug = instance, debug
        self._completions = Completions(instance, clock, edge or Edge())

    def app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY, middlewares=[self._openai_errors])
        app.router.add_post("/v1/completions", self._completions.text)
        app.router.add_post("/v1/chat/completions", self._completions.chat)
        app.router.add_get("/v1/models", self._completions.models)
        app.router.add_get("/v1/models/{model:.+}", self._completions.model)
        app.router.add_get("/health", self._health)
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/metrics", self._metrics)
        if self._debug:
            app.router.add_route("*", "/echo", self._echo)
        return app

    async def end(self) -> None:
        """Answers under way are ended with a word on it: see Completions.end."""
        await self._completions.end()

    @web.middleware
    async def _openai_errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """What aiohttp itself refuses (no such path, wrong method) as clients of this API read it."""
        try:
            return await handler(request)
        except web.HTTPException as error:
            if error.status < BAD:
                raise
            said = ApiError(error.status, f"{request.method} {request.path[:200]}: {error.reason}")
            kept = {name: value for name, value in error.headers.items() if name == "Allow"}
            return refusal(said, self._completions.told(request) | kept)

    async def _health(self, _: web.Request) -> web.Response:
        why = self._it.why_ill()
        return web.Response(status=503 if why else 200, text=(why or "alive") + "\n")

    async def _ready(self, _: web.Request) -> web.Response:
        why = self._it.why_not_ready()
        return web.Response(status=503 if why else 200, text=(why or "ready") + "\n")

    async def _metrics(self, _: web.Request) -> web.Response:
        body = generate_latest(self._it.registry)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _echo(self, request: web.Request) -> web.Response:
        """Headers as they arrived, lower case; a header that came twice is a list of two."""
        seen: dict[str, list[str]] = {}
        for name, value in request.headers.items():
            seen.setdefault(name.lower(), []).append(value)
        body = {"path": request.path_qs, "headers": seen}
        return web.json_response(body, headers=self._completions.headers)
