"""One answer on its way out, whole or as a stream.

Law: HTTP out and nothing else: what was asked is checked already, what comes is the engine's. Before the
first byte every failure is a clean status, which an ingress may retry elsewhere; after it, an error event and
a cut connection, whoever ended it: the engine, a deadline, or we ourselves. No client holds that up.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from aiohttp import web
from aiohttp.http_writer import StreamWriter

from services import openai_answers as say
from services.choices import together
from services.faults import DeadlinePassed
from services.generation import Generation, Piece, too_late
from services.openai_api import Ask
from services.openai_fields import ApiError

JSON = "application/json"
SSE_HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-store"}
BEGUN = web.RequestKey("weir.answer", web.StreamResponse)
CUT = web.RequestKey("weir.cut", bool)
_SAID_ALL = web.RequestKey("weir.said_all", bool)
"""Keys of a request: its answer, once it has begun; that it could not be finished; that [DONE] is on its
way."""
LAST_WORDS_S = 1.0
"""How long a client may take to read why its stream ends; one who doesn't read would wait for ever."""
FLUSH_POLL_S = 0.01
HeadersOf = Callable[[], Mapping[str, str]]
"""Called when the first token is there: what is told then, only then is known."""


class Stalled(ConnectionError):
    """The client has read nothing for too long; its line is cut."""


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be answered. parts: one sequence per choice. first_byte_s, deadline_s, own_limit: as in
    services.caller. write_s: as in AnswerSettings."""

    ask: Ask
    identity: str
    created: int
    parts: Sequence[Generation]
    first_byte_s: float | None
    deadline_s: float | None
    own_limit: bool
    headers: HeadersOf
    write_s: float

    def usage(self) -> say.Usage:
        """Prompts are counted once, however many choices each has."""
        n = self.ask.n
        prompts = (max(p.prompt_tokens for p in self.parts[i : i + n]) for i in range(0, len(self.parts), n))
        return say.usage(sum(prompts), sum(part.tokens for part in self.parts))


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
        raise _late(own=order.own_limit) from None
    except ApiError as error:
        # The engine knows of one limit only, whosever it is.
        if error.code == DeadlinePassed.code and not order.own_limit:
            raise _late(own=False) from error
        raise
    body = say.whole(order.ask, order.identity, order.created, choices, order.usage())
    return web.Response(body=body, content_type=JSON, headers=order.headers())


def _late(*, own: bool) -> ApiError:
    return too_late("the deadline passed before the answer was there", own=own)


async def stream(request: web.Request, order: Order) -> web.StreamResponse:
    """SSE. The first token is awaited before headers go out. Raises ApiError; where that is after the first
    byte, BEGUN stands in the request, and `broken_off` has to follow. Raises Stalled where the client doesn't
    read: its line is cut then."""
    ends = None if order.deadline_s is None else asyncio.get_running_loop().time() + order.deadline_s
    try:
        async with (
            asyncio.timeout(order.first_byte_s) as limit,
            contextlib.aclosing(together(order.parts)) as pieces,
        ):
            first = await anext(pieces)
            limit.reschedule(ends)
            answer = web.StreamResponse(headers={**order.headers(), **SSE_HEADERS})
            await answer.prepare(request)
            request[BEGUN] = answer
            line = _Line(request, order)
            await _events(line.write, order, first, pieces)
            request[_SAID_ALL] = True
            await line.write(say.DONE)
    except TimeoutError:
        raise _late(own=order.own_limit or BEGUN in request) from None
    await line.end(answer)
    return answer


class _Line:
    """The way to a client: a write takes as long as it likes while some of it gets through."""

    def __init__(self, request: web.Request, order: Order) -> None:
        self._writer, self._protocol = cast(StreamWriter, request.writer), request.protocol
        self._limit_s, self._who = order.write_s, order.identity

    async def write(self, data: bytes) -> None:
        await self._writer.write(data, drain=False)
        if self._protocol.writing_paused:
            await self._patient(self._writer.drain())

    async def end(self, answer: web.StreamResponse) -> None:
        await self._patient(answer.write_eof())

    async def _patient(self, sending: Coroutine[Any, Any, None]) -> None:
        """Wait for it. Raises Stalled, with the line cut, when nothing moves for the limit."""
        line, sent = self._protocol.transport, asyncio.ensure_future(sending)
        try:
            while line is not None:
                before = line.get_write_buffer_size()
                if (await asyncio.wait((sent,), timeout=self._limit_s))[0]:
                    break
                if line.get_write_buffer_size() >= before:
                    line.abort()
                    raise Stalled(f"{self._who}: cut: its client read nothing for {self._limit_s:g} s")
            await sent
        finally:
            sent.cancel()


async def _events(
    write: Callable[[bytes], Awaitable[None]],
    order: Order,
    first: Piece,
    pieces: AsyncGenerator[Piece, None],
) -> None:
    events, with_ids = say.Events(order.ask, order.identity, order.created), order.ask.token_ids
    await write(_event(events, first, with_ids))
    async for piece in pieces:
        if event := _event(events, piece, with_ids):
            await write(event)
    if order.ask.include_usage:
        await write(events.usage(order.usage()))


def _event(events: say.Events, piece: Piece, with_ids: bool) -> bytes:
    """Of one piece; empty where there is nothing to say yet."""
    index, text, finish, token_id = piece
    if with_ids:
        return events.event(index, text, finish, (token_id,))
    return events.event(index, text, finish) if text or finish or not events.begun(index) else b""


async def broken_off(request: web.Request, why: ApiError, cut: Callable[[], None]) -> web.StreamResponse:
    """End an answer that has begun, with a word on why. cut: told, unless all had been said by then.

    The connection ends and not the chunked body: a proper end would tell who reads no events that all is
    well. The word is out before: it is waited for, within LAST_WORDS_S.
    """
    begun, line = request[BEGUN], request.transport
    if _SAID_ALL in request:
        return begun
    cut()
    request[CUT] = True
    if line is None:
        return begun
    try:
        async with asyncio.timeout(LAST_WORDS_S):
            # No `drain` of aiohttp's: one that was cancelled, by a deadline or by us, leaves a cancelled
            # future behind, and the next one on that connection raises at once.
            await cast(StreamWriter, request.writer).write(say.failure(why.message, why.code), drain=False)
            while line.get_write_buffer_size():  # noqa: ASYNC110 (no event tells it)
                await asyncio.sleep(FLUSH_POLL_S)
    except TimeoutError:
        line.abort()
    else:
        line.close()
    return begun
