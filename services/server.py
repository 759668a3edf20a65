"""The executor's HTTP server: OpenAI's endpoints, health, metrics.

Law: one request in, one answer out; what tokens come is the engine's, whether we may serve is the
instance's. No gRPC and no protobuf in here: nine of these start on two cores.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

from aiohttp import web
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from mesh.clock import Clock
from services import openai_answers as say
from services import openai_api as api
from services.generation import Generation
from services.instance import Instance
from services.openai_api import ApiError, Ask

MAX_BODY = 8 * 1024 * 1024
JSON = "application/json"
SSE_HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-store"}
BAD, CLIENT_GONE, BUG = 400, 499, 500
"""From where a status is an error; and, in the metrics only: the client left, a handler broke."""

Piece = tuple[str, str | None]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    """Routes of one instance. debug: also `/echo`, which shows the headers that arrived."""

    def __init__(self, instance: Instance, clock: Clock, *, debug: bool = False) -> None:
        self._it, self._clock, self._debug = instance, clock, debug
        who = instance.identity
        self._headers = {
            "x-weir-instance": who.instance,
            "x-weir-region": who.region,
            "x-weir-stage": who.stage,
        }

    def app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY, middlewares=[_openai_errors])
        app.router.add_post("/v1/completions", self._counted(False))
        app.router.add_post("/v1/chat/completions", self._counted(True))
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/metrics", self._metrics)
        if self._debug:
            app.router.add_route("*", "/echo", self._echo)
        return app

    def _counted(self, chat: bool) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            self._it.enter()
            code = BUG
            try:
                answer = await self._complete(request, chat)
                code = answer.status
                return answer
            except (asyncio.CancelledError, ConnectionError):
                code = CLIENT_GONE
                raise
            finally:
                self._it.leave()
                self._it.answered(code)

        return handle

    async def _complete(self, request: web.Request, chat: bool) -> web.StreamResponse:
        try:
            ask = api.parse(await _body(request), chat=chat, model=self._it.identity.model)
            if self._it.dead:
                raise ApiError(503, f"the engine is dead: {self._it.dead}", code="engine_dead")
            if ask.stream:
                return await self._stream(request, ask)
            return await self._whole(ask)
        except ApiError as error:
            return _refusal(error, self._headers)

    async def _whole(self, ask: Ask) -> web.Response:
        identity, created = _identity(ask), int(self._clock.time())
        made = Generation(self._it, ask, identity)
        async with contextlib.aclosing(made.pieces()) as pieces:
            parts = [text async for text, _ in pieces]
        used = say.usage(made.prompt_tokens, made.tokens)
        body = say.whole(ask, identity, created, "".join(parts), made.finish, used)
        return web.Response(body=body, content_type=JSON, headers=self._headers)

    async def _stream(self, request: web.Request, ask: Ask) -> web.StreamResponse:
        """SSE. The first token is awaited before headers go out, so that a failure is still a clean 5xx
        that the ingress may retry elsewhere."""
        identity, created = _identity(ask), int(self._clock.time())
        made = Generation(self._it, ask, identity)
        async with contextlib.aclosing(made.pieces()) as pieces:
            first = await anext(pieces)
            answer = web.StreamResponse(headers={**self._headers, **SSE_HEADERS})
            await answer.prepare(request)
            begun = False
            try:
                async for text, finish in _chain(first, pieces):
                    if text or finish or not begun:
                        await answer.write(say.chunk(ask, identity, created, text, finish, not begun))
                        begun = True
            except ApiError as error:
                await answer.write(say.failure_chunk(error.message))
                _cut(request)
                return answer
        if ask.include_usage:
            used = say.usage(made.prompt_tokens, made.tokens)
            await answer.write(say.usage_chunk(ask, identity, created, used))
        await answer.write(say.DONE)
        await answer.write_eof()
        return answer

    async def _models(self, _: web.Request) -> web.Response:
        model = {"id": self._it.identity.model, "object": "model", "created": 0, "owned_by": "weir"}
        return web.json_response({"object": "list", "data": [model]}, headers=self._headers)

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=503 if self._it.dead else 200, text=(self._it.dead or "alive") + "\n")

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
        return web.json_response({"path": request.path_qs, "headers": seen}, headers=self._headers)


async def _body(request: web.Request) -> bytes:
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise ApiError(413, f"the body is larger than {MAX_BODY} bytes") from None


def _refusal(error: ApiError, headers: Mapping[str, str]) -> web.Response:
    return web.Response(status=error.status, body=error.body(), content_type=JSON, headers=headers)


@web.middleware
async def _openai_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """What aiohttp itself refuses (no such path, wrong method) in the form that clients of this API read."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        if error.status < BAD:
            raise
        said = ApiError(error.status, f"{request.method} {request.path[:200]}: {error.reason}")
        kept = {name: value for name, value in error.headers.items() if name == "Allow"}
        return _refusal(said, kept)


async def _chain(first: Piece, rest: AsyncIterator[Piece]) -> AsyncIterator[Piece]:
    yield first
    async for item in rest:
        yield item


def _cut(request: web.Request) -> None:
    """End the connection, not the chunked body: a proper end would tell the client that all is well."""
    if request.transport is not None:
        request.transport.close()


def _identity(ask: Ask) -> str:
    return ("chatcmpl-" if ask.chat else "cmpl-") + os.urandom(12).hex()
