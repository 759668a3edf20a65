"""The executor's HTTP server: OpenAI's endpoints, health, metrics.

Law: one request in, one answer out; what tokens come is the engine's, whether we may serve is the
instance's. No gRPC and no protobuf in here: nine of these start on two cores.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from random import Random, SystemRandom

from aiohttp import web
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from mesh.clock import Clock
from services import answer, caller, intake, tenants_file
from services import openai_api as api
from services.answer import JSON, Order
from services.caller import Caller
from services.generation import Generation, on_the_wire
from services.instance import Instance
from services.openai_api import ApiError, Ask
from services.telemetry import orca, spans
from services.telemetry.load import Load
from services.telemetry.outgoing import Carrying
from services.telemetry.tally import Watch
from services.telemetry.trace import NoTracing, Span, Tracing
from services.tenants import Tenants

MAX_BODY = 8 * 1024 * 1024
BAD, CLIENT_GONE, BUG = 400, 499, 500
"""From where a status is an error; and, in the metrics only: the client left, a handler broke."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Edge:
    """What the server needs besides its instance. chance: seeds of requests that name none, and ids."""

    tenants: Tenants = field(default_factory=tenants_file.load)
    chance: Random = field(default_factory=SystemRandom)
    tracing: Tracing = field(default_factory=NoTracing)


class Server:
    """Routes of one instance. debug: also `/echo`, which shows the headers that arrived."""

    def __init__(
        self, instance: Instance, clock: Clock, *, debug: bool = False, edge: Edge | None = None
    ) -> None:
        self._it, self._clock, self._debug, self._edge = instance, clock, debug, edge or Edge()
        self._load = Load(instance, clock)
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
                said = await self._traced(request, chat)
                code = said.status
                return said
            except (asyncio.CancelledError, ConnectionError):
                code = CLIENT_GONE
                raise
            finally:
                self._it.leave()
                self._it.answered(code)

        return handle

    async def _traced(self, request: web.Request, chat: bool) -> web.StreamResponse:
        who = caller.read(request.headers, self._edge.tenants, self._new_id("req-"))
        span = self._edge.tracing.begin(
            spans.name(chat, self._it.identity.model),
            who.carried,
            spans.request(chat, self._it.identity, who.request_id, who.tenant.label),
        )
        error = "cancelled"
        try:
            said = await self._complete(request, chat, who, span)
            error = "" if said.status < BAD else str(said.status)
            span.set(spans.status(said.status))
            return said
        except Exception as raised:
            error = type(raised).__name__
            raise
        finally:
            span.end(error)

    async def _complete(
        self, request: web.Request, chat: bool, who: Caller, span: Span
    ) -> web.StreamResponse:
        watch = Watch(self._it.tally, who.tenant.label, self._clock.monotonic)
        try:
            ask = api.parse(await _body(request), chat=chat, model=self._it.identity.model)
            if why := self._it.why_ill():
                raise ApiError(503, f"the engine is dead: {why}", code="engine_dead")
            identity = self._new_id("chatcmpl-" if chat else "cmpl-")
            span.set(spans.ask(ask, identity))
            order, ids = self._order(ask, who, identity, watch)
            with Carrying(span.headers, ids):
                try:
                    if ask.stream:
                        return await answer.stream(request, order, self._it.cut)
                    return await answer.whole(order)
                finally:
                    span.set(spans.made(order.parts, order.usage(), watch.first_s))
        except ApiError as error:
            return _refusal(error, self._told(who))

    def _order(self, ask: Ask, who: Caller, identity: str, watch: Watch) -> tuple[Order, tuple[str, ...]]:
        """Everything that can be refused is refused in here. Raises ApiError."""
        try:
            jobs = intake.jobs(ask, self._it.engine, who, identity, lambda: self._edge.chance.getrandbits(63))
        except RuntimeError as error:
            raise on_the_wire(error) from error
        # The first one's watch is the request's own: its clock runs since before the body was read.
        parts = [Generation(self._it, job, i, watch.another() if i else watch) for i, job in enumerate(jobs)]
        order = Order(
            ask=ask,
            identity=identity,
            created=int(self._clock.time()),
            parts=parts,
            first_byte_s=who.first_byte_s,
            deadline_s=who.deadline_s,
            headers=lambda: self._told(who, parts),
        )
        return order, tuple(job.request_id for job in jobs)

    def _told(self, who: Caller, parts: list[Generation] | None = None) -> dict[str, str]:
        """Headers of an answer."""
        told = {**self._headers, caller.REQUEST_ID: who.request_id, orca.HEADER: self._load.header()}
        if made := next((part for part in parts or () if part.engine), None):
            told["x-weir-engine"] = made.engine
            if made.fallback:
                told["x-weir-fallback"] = made.fallback
        return told

    def _new_id(self, start: str) -> str:
        return f"{start}{self._edge.chance.getrandbits(96):024x}"

    async def _models(self, request: web.Request) -> web.Response:
        who = caller.read(request.headers, self._edge.tenants, self._new_id("req-"))
        model = {"id": self._it.identity.model, "object": "model", "created": 0, "owned_by": "weir"}
        context = self._it.engine.facts().context or None
        body = {"object": "list", "data": [{**model, "max_model_len": context}]}
        return web.json_response(body, headers=self._told(who))

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
        return web.json_response({"path": request.path_qs, "headers": seen}, headers=self._headers)


async def _body(request: web.Request) -> bytes:
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise ApiError(413, f"the body is larger than {MAX_BODY} bytes") from None


def _refusal(error: ApiError, headers: Mapping[str, str]) -> web.Response:
    told = dict(headers)
    if error.retry_after_s > 0:
        # Whole seconds are all that the standard has; OpenAI's clients read the finer one first.
        told["Retry-After"] = str(math.ceil(error.retry_after_s))
        told["retry-after-ms"] = str(math.ceil(error.retry_after_s * 1000))
    return web.Response(status=error.status, body=error.body(), content_type=JSON, headers=told)


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
