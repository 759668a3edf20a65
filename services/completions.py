"""The two endpoints that make tokens: from a request to its answer, counted and traced.

Law: everything that can be refused is refused before an engine is asked. Each request is counted once,
whatever becomes of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random, SystemRandom

from aiohttp import web

from mesh.clock import Clock
from services import answer, caller, intake, tenants_file
from services import openai_api as api
from services.answer import JSON, Order
from services.answer_settings import AnswerSettings
from services.caller import Caller
from services.generation import Generation, on_the_wire, shutting_down
from services.instance import Instance
from services.openai_api import ApiError, Ask
from services.openai_fields import OVER
from services.telemetry import orca, spans
from services.telemetry.load import Load
from services.telemetry.outgoing import Carrying
from services.telemetry.tally import Watch
from services.telemetry.trace import NoTracing, Span, Tracing
from services.tenants import Tenants
from services.underway import Underway

log = logging.getLogger("weir.executor")

MAX_BODY = 8 * 1024 * 1024
BAD, CLIENT_GONE, BUG = 400, 499, 500
"""From where a status is an error; and, in the metrics only: the client left, a handler broke."""
END_S = answer.LAST_WORDS_S + 0.5
"""Longest time from "end all" to the last word; whatever is left then is cut without one."""


@dataclass(frozen=True, slots=True)
class Edge:
    """What the server needs besides its instance. chance: seeds of requests that name none, and ids."""

    tenants: Tenants = field(default_factory=tenants_file.load)
    chance: Random = field(default_factory=SystemRandom)
    tracing: Tracing = field(default_factory=NoTracing)
    answers: AnswerSettings = field(default_factory=AnswerSettings)


class Completions:
    """Of one instance."""

    def __init__(self, instance: Instance, clock: Clock, edge: Edge) -> None:
        self._it, self._clock, self._edge = instance, clock, edge
        self._load, self._underway = Load(instance, clock), Underway()
        who = instance.identity
        self.headers = {
            "x-weir-instance": who.instance,
            "x-weir-region": who.region,
            "x-weir-stage": who.stage,
        }

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._counted(request, True)

    async def text(self, request: web.Request) -> web.StreamResponse:
        return await self._counted(request, False)

    async def models(self, request: web.Request) -> web.Response:
        body = {"object": "list", "data": [self._model()]}
        return web.json_response(body, headers=self.told(request))

    async def model(self, request: web.Request) -> web.Response:
        told, wanted = self.told(request), request.match_info["model"]
        if wanted != self._it.identity.model:
            return refusal(api.no_such_model(wanted, self._it.identity.model), told)
        return web.json_response(self._model(), headers=told)

    def _model(self) -> dict[str, object]:
        return {
            "id": self._it.identity.model,
            "object": "model",
            "created": 0,
            "owned_by": "weir",
            "max_model_len": self._it.engine.facts().context or None,
        }

    async def _counted(self, request: web.Request, chat: bool) -> web.StreamResponse:
        self._it.enter()
        code = BUG
        try:
            said = await self._traced(request, chat)
            code = said.status
            return said
        except asyncio.CancelledError:
            code = CLIENT_GONE
            raise
        except ConnectionError as gone:
            # The client left while we were writing; an exception would fill the log with tracebacks.
            code = CLIENT_GONE
            if isinstance(gone, answer.Stalled):
                log.warning("%s", gone)
            return request.get(answer.BEGUN) or web.Response(status=CLIENT_GONE)
        finally:
            self._it.leave()
            self._it.answered(code)

    async def _traced(self, request: web.Request, chat: bool) -> web.StreamResponse:
        who = self._caller(request)
        span = self._edge.tracing.begin(
            spans.name(chat, self._it.identity.model),
            who.carried,
            spans.request(chat, self._it.identity, who.request_id, who.tenant.label),
        )
        code, error = CLIENT_GONE, ""
        try:
            said = await self._complete(request, chat, who, span)
            code = said.status
            # A mistake of the client is no error of a server's span: HTTP's semantic conventions.
            error = str(code) if code >= BUG else "cut" if answer.CUT in request else ""
            return said
        except (asyncio.CancelledError, ConnectionError):
            raise  # a client that leaves is no error of ours
        except Exception as raised:
            code, error = BUG, type(raised).__name__
            raise
        finally:
            span.set(spans.status(code))
            span.end(error)

    async def _complete(
        self, request: web.Request, chat: bool, who: Caller, span: Span
    ) -> web.StreamResponse:
        watch = Watch(self._it.tally, who.tenant.label, self._clock.monotonic)
        try:
            with self._underway.one():
                ask = api.parse(await _body(request), chat=chat, model=self._it.identity.model)
                if why := self._it.why_ill():
                    raise ApiError(503, f"the engine is dead: {why}", code="engine_dead")
                identity = self._new_id("chatcmpl-" if chat else "cmpl-")
                span.set(spans.ask(ask, identity))
                order, ids = self._order(ask, who, identity, watch)
                with Carrying(span.headers, ids):
                    try:
                        return await (answer.stream(request, order) if ask.stream else answer.whole(order))
                    finally:
                        span.set(spans.made(order.parts, order.usage(), watch.first_s))
        except ApiError as error:
            if answer.BEGUN in request:
                return await answer.broken_off(request, error, self._it.cut)
            return refusal(error, self._told(who))

    async def end(self) -> None:
        """End what is under way, each with a word to its client, and refuse what still comes. Returns when
        all have gone, after END_S at the latest. Fine to call twice."""
        if ended := self._underway.end(shutting_down()):
            log.warning("%d answers ended before they were finished", ended)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await self._it.idle.wait()

    def _order(self, ask: Ask, who: Caller, identity: str, watch: Watch) -> tuple[Order, tuple[str, ...]]:
        """The sequences to make, and their request ids. Raises ApiError."""
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
            own_limit=who.own_limit,
            headers=lambda: self._told(who, parts),
            write_s=self._edge.answers.write_s,
        )
        return order, tuple(job.request_id for job in jobs)

    def told(self, request: web.Request) -> dict[str, str]:
        """Headers of an answer to this request, whatever it is."""
        return self._told(self._caller(request))

    def _told(self, who: Caller, parts: list[Generation] | None = None) -> dict[str, str]:
        """Headers of an answer."""
        ended = sum(bool(part.finish) for part in parts or ())
        told = {**self.headers, caller.REQUEST_ID: who.request_id, orca.HEADER: self._load.header(ended)}
        if made := next((part for part in parts or () if part.engine), None):
            told["x-weir-engine"] = made.engine
            if made.fallback:
                told["x-weir-fallback"] = made.fallback
        return told

    def _caller(self, request: web.Request) -> Caller:
        return caller.read(request.headers, self._edge.tenants, self._new_id("req-"))

    def _new_id(self, start: str) -> str:
        return f"{start}{self._edge.chance.getrandbits(96):024x}"


async def _body(request: web.Request) -> bytes:
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise ApiError(413, f"the body is larger than {MAX_BODY} bytes") from None


def refusal(error: ApiError, headers: Mapping[str, str]) -> web.Response:
    """An error as clients of this API read it."""
    told = dict(headers)
    if error.retry_after_s > 0:
        # Whole seconds are all that the standard has; OpenAI's clients read the finer one first.
        told["Retry-After"] = str(math.ceil(error.retry_after_s))
        told["retry-after-ms"] = str(math.ceil(error.retry_after_s * 1000))
    if error.status == OVER:
        # OpenAI's clients try 408 again by themselves, with the same deadline: the work would be done thrice.
        told["x-should-retry"] = "false"
    return web.Response(status=error.status, body=error.body(), content_type=JSON, headers=told)
