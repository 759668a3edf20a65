"""The executor's HTTP server: OpenAI's endpoints, health, metrics.

Law: one request in, one answer out; what tokens come is the engine's, whether we may serve is the
instance's. No gRPC and no protobuf in here: nine of these start on two cores.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable

from aiohttp import web
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from mesh.clock import Clock
from services import openai_api as api
from services.engine import FinishReason, GenerateRequest, Token
from services.instance import Instance
from services.openai_api import ApiError, Ask
from services.stops import Cutter

MAX_BODY = 8 * 1024 * 1024
JSON = "application/json"


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
        app = web.Application(client_max_size=MAX_BODY)
        app.router.add_post("/v1/completions", self._counted(False))
        app.router.add_post("/v1/chat/completions", self._counted(True))
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/metrics", self._metrics)
        if self._debug:
            app.router.add_route("*", "/echo", self._echo)
        return app

    def _counted(self, chat: bool) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            self._it.enter()
            code = 499  # the client went away before there was an answer
            try:
                answer = await self._complete(request, chat)
                code = answer.status
                return answer
            finally:
                self._it.leave()
                self._it.requests.labels(str(code)).inc()

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
            return web.Response(
                status=error.status, body=error.body(), content_type=JSON, headers=self._headers
            )

    async def _whole(self, ask: Ask) -> web.Response:
        identity, created, count = _identity(ask), int(self._clock.time()), 0
        parts: list[str] = []
        finish = FinishReason.STOP
        async with contextlib.aclosing(self._tokens(ask, identity)) as tokens:
            async for text, token in tokens:
                parts.append(text)
                count += 1
                finish = token.finish or finish
        used = api.usage(_prompt_tokens(ask), count)
        body = api.whole(ask, identity, created, "".join(parts), finish.value, used)
        return web.Response(body=body, content_type=JSON, headers=self._headers)

    async def _stream(self, request: web.Request, ask: Ask) -> web.StreamResponse:
        """SSE. The first token is awaited before headers go out, so that a failure is still a clean 5xx
        that the ingress may retry elsewhere."""
        identity, created, count = _identity(ask), int(self._clock.time()), 0
        async with contextlib.aclosing(self._tokens(ask, identity)) as tokens:
            first = await anext(tokens)
            headers = {**self._headers, "Content-Type": "text/event-stream", "Cache-Control": "no-store"}
            answer = web.StreamResponse(headers=headers)
            await answer.prepare(request)
            try:
                async for text, token in _chain(first, tokens):
                    finish = token.finish.value if token.finish else None
                    await answer.write(api.chunk(ask, identity, created, text, finish, count == 0))
                    count += 1
            except ApiError as error:
                await answer.write(api.failure_chunk(error.message))
                _abort(request)
                return answer
            if ask.include_usage:
                used = api.usage(_prompt_tokens(ask), count)
                await answer.write(api.usage_chunk(ask, identity, created, used))
            await answer.write(api.DONE)
            await answer.write_eof()
            return answer

    async def _tokens(self, ask: Ask, identity: str) -> AsyncGenerator[tuple[str, Token], None]:
        """(text to send, token). Ends at a stop string; a failing engine becomes an ApiError."""
        job = GenerateRequest(identity, ask.prompt, ask.max_tokens, ask.seed, ask.stop, ask.temperature)
        cutter = Cutter(ask.stop)
        try:
            async with contextlib.aclosing(self._it.engine.generate(job)) as made:
                async for token in made:
                    self._it.tokens.inc()
                    text = cutter.feed(token.text)
                    if token.finish and not cutter.stopped:
                        text += cutter.rest()
                    yield text, token
                    if cutter.stopped:
                        return
        except RuntimeError as error:
            if self._it.engine.stats().extra.get("dead"):
                self._it.failed(str(error))
            raise ApiError(503, f"the engine failed: {error}", code="engine_error") from error

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


async def _chain(
    first: tuple[str, Token], rest: AsyncIterator[tuple[str, Token]]
) -> AsyncIterator[tuple[str, Token]]:
    yield first
    async for item in rest:
        yield item


def _abort(request: web.Request) -> None:
    """Cut the connection: a proper end of the chunked body would tell the client that all is well."""
    if request.transport is not None:
        request.transport.abort()


def _identity(ask: Ask) -> str:
    return ("chatcmpl-" if ask.chat else "cmpl-") + os.urandom(12).hex()


def _prompt_tokens(ask: Ask) -> int:
    return max(1, -(-len(ask.prompt) // 4))
