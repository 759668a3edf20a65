"""One request on its way through the scheduler: a ticket, its own task, and what its reader has not taken.

Law: that task alone drives the inner engine, and is cancelled once at most; the reader takes from the outbox
and nothing else. So a reader that is slow holds no place that the engine is done with, and no cancellation of
a reader's is taken for a fault.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from services.batching.model import Ticket
from services.engine import Token
from services.faults import EngineFault

log = logging.getLogger("weir.batching")


@dataclass(slots=True, eq=False)
class Job(Ticket):
    """turn: done when it has its place; None: it had one at once. serving: the
    task that drives `inner`. outbox: tokens, and in the end what went wrong. sent: a token stands or stood
    in it. tries: so many have failed. stopped: it is to end, whatever it does. closing: the inner engine is
    letting go, which must not be broken off.
    """

    turn: asyncio.Future[None] | None = None
    serving: asyncio.Task[None] | None = None
    inner: AsyncGenerator[Token, None] | None = None
    outbox: deque[Token | Exception] = field(default_factory=deque)
    sent: bool = False
    tries: int = 0
    stopped: bool = False
    closing: bool = False
    reader: asyncio.Future[None] | None = None
    room: asyncio.Future[None] | None = None

    def called(self) -> None:
        """Its turn has come."""
        _done(self.turn)

    def put(self, what: Token | Exception) -> None:
        self.outbox.append(what)
        _done(self.reader)

    async def take(self) -> Token:
        """The next token. Raises what ended the sequence."""
        while not self.outbox:
            self.reader = asyncio.get_running_loop().create_future()
            await self.reader
        what = self.outbox.popleft()
        _done(self.room)
        if isinstance(what, Token):
            return what
        raise what

    async def space(self, most: int) -> None:
        """Until its reader has taken so much that the outbox holds less than `most`."""
        while len(self.outbox) >= most:
            self.room = asyncio.get_running_loop().create_future()
            await self.room

    def end(self, fault: EngineFault) -> None:
        """From outside: the reader hears it next, before anything that it has not taken."""
        if not self.stopped:
            self.outbox.clear()
            self.put(fault)
            self.stop()

    def stop(self) -> None:
        if self.stopped or self.serving is None:
            return
        self.stopped = True
        if not self.closing:
            self.serving.cancel()

    async def over(self) -> None:
        """Nobody reads any more: when this returns, the inner engine has let go."""
        if self.serving is not None and not self.serving.done():
            self.stop()
            await asyncio.wait((self.serving,))

    async def next_token(self, now: float, limit_s: float) -> Token:
        """The inner engine's next token, and when its silence will be a hang."""
        if self.inner is None:
            raise RuntimeError("tokens come from an engine that was asked")
        self.stall_at = now + limit_s
        try:
            return await anext(self.inner)
        except StopAsyncIteration:
            raise EngineFault("the engine ended without saying why") from None
        finally:
            self.stall_at = math.inf

    async def let_go(self) -> None:
        """The inner engine gives back what it held for this job. Where it fails at that the log says so: what
        it had to tell the reader has been told. Fine to call twice."""
        inner, self.inner = self.inner, None
        if inner is None:
            return
        self.closing = True
        try:
            await inner.aclose()
        except Exception:
            log.exception("the engine failed while it let go of a sequence")
        finally:
            self.closing = False
        if self.stopped:
            raise asyncio.CancelledError


def _done(future: asyncio.Future[None] | None) -> None:
    if future is not None and not future.done():
        future.set_result(None)
