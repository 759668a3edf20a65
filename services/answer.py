"""One answer on its way out, whole or as a stream.

Law: HTTP out and nothing else: what was asked is checked already, what comes is the engine's. Before the
first byte every failure is a clean status, which an ingress may retry elsewhere; after it, an error event and
a cut connection.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from aiohttp import web

from services import openai_answers as say
from services.choices import together
from services.generation import Generation, Piece
from services.openai_api import Ask
from services.openai_fields import ApiError

JSON = "application/json"
SSE_HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-store"}
BEGUN = web.RequestKey("weir.answer", web.StreamResponse)
CUT = web.RequestKey("weir.cut", bool)
"""Keys of a request: its answer, once it has begun; and that it could not be finished."""
HeadersOf = Callable[[], Mapping[str, str]]
"""Called when the first token is there: what is told then, only then is known."""


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be answered. parts: one sequence per choice. first_byte_s, deadline_s: as in
    services.caller."""

    ask: Ask
    identity: str
    created: int
    parts: Sequence[Generation]
    first_byte_s: float | None
    deadline_s: float | None
    headers: HeadersOf

    def usage(self) -> say.Usage:
        """Prompts are counted once, however many choices each has."""
        n = self.ask.n
        prompts = (max(p.prompt_tokens for p in self.parts[i : i + n]) for i in range(0, len(self.parts), n))
        return say.usage(sum(prompts), sum(part.tokens for part in self.parts))


def too_late() -> ApiError:
    return ApiError(504, "the deadline passed before the answer was there", None, "deadline_passed")


async def whole(order: Order) -> web.Response:
    """Raises ApiError."""
    choices = [say.Choice(index) for index in range(len(order.parts))]
    try:
        async with asyncio.timeout(order.first_byte_s), contextlib.aclosing(together(order.parts)) as pieces:
            async for index, text, finish, token_id in pieces:
                one = choices[index]
                one.texts.append(text)
                one.ids.append(token_id)
                one.finish = finish or one.finish
    except TimeoutError:
        raise too_late() from None
    body = say.whole(order.ask, order.identity, order.created, choices, order.usage())
    return web.Response(body=body, content_type=JSON, headers=order.headers())


async def stream(request: web.Request, order: Order, cut: Callable[[], None]) -> web.StreamResponse:
    """SSE. The first token is awaited before headers go out. cut: told when a stream that had begun failed.
    Raises ApiError while nothing was sent."""
    begun: list[web.StreamResponse] = []
    try:
        await _stream(request, order, begun)
    except (ApiError, TimeoutError) as error:
        said = error if isinstance(error, ApiError) else too_late()
        if not begun:
            raise said from error
        cut()
        request[CUT] = True
        await begun[0].write(say.failure(said.message, said.code))
        _cut(request)
    return begun[0]


async def _stream(request: web.Request, order: Order, begun: list[web.StreamResponse]) -> None:
    ends = None if order.deadline_s is None else asyncio.get_running_loop().time() + order.deadline_s
    async with (
        asyncio.timeout(order.first_byte_s) as limit,
        contextlib.aclosing(together(order.parts)) as pieces,
    ):
        first = await anext(pieces)
        limit.reschedule(ends)
        answer = web.StreamResponse(headers={**order.headers(), **SSE_HEADERS})
        await answer.prepare(request)
        begun.append(answer)
        request[BEGUN] = answer
        events = say.Events(order.ask, order.identity, order.created)
        write, with_ids = answer.write, order.ask.token_ids
        await write(_event(events, first, with_ids))
        async for piece in pieces:
            if event := _event(events, piece, with_ids):
                await write(event)
        if order.ask.include_usage:
            await answer.write(events.usage(order.usage()))
        await answer.write(say.DONE)
    await answer.write_eof()


def _event(events: say.Events, piece: Piece, with_ids: bool) -> bytes:
    """Of one piece; empty where there is nothing to say yet."""
    index, text, finish, token_id = piece
    if with_ids:
        return events.event(index, text, finish, (token_id,))
    return events.event(index, text, finish) if text or finish or not events.begun(index) else b""


def _cut(request: web.Request) -> None:
    """End the connection, not the chunked body: a proper end would tell the client that all is well."""
    if request.transport is not None:
        request.transport.close()
