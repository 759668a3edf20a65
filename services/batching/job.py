"""One request on its way through the scheduler: a ticket, its reader, and the inner engine's iterator.

Law: whoever waits for a token can be interrupted with a fault, whoever doesn't (a slow client) has the
iterator closed behind its back; the reader's own cancellation is never swallowed.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from services.batching.model import Ticket
from services.engine import Token
from services.faults import EngineFault

log = logging.getLogger("weir.batching")


@dataclass(slots=True, eq=False)
class Job(Ticket):
    """turn: done when it has its place, or never will (then `fault` says why); None: it had one at once.
    task: whoever waits for the next token. sent: something reached the reader. tries: so many have failed.
    """

    turn: asyncio.Future[None] | None = None
    inner: AsyncGenerator[Token, None] | None = None
    task: asyncio.Task[object] | None = None
    fault: EngineFault | None = None
    interrupted: bool = False
    sent: bool = False
    tries: int = 0
    eviction: asyncio.Task[None] | None = None

    def called(self) -> None:
        """Its turn has come, or something else that it must hear."""
        if self.turn is not None and not self.turn.done():
            self.turn.set_result(None)

    def interrupt(self, fault: EngineFault, freed: Callable[[], None]) -> None:
        """End it from outside. freed: called once the inner engine has let go, where the reader is away and
        can't see to it.
        """
        self.fault = fault
        self.called()
        if self.task is not None:
            self.interrupted = True
            self.task.cancel()
        elif self.inner is not None:
            self.eviction = asyncio.ensure_future(_closed(self.inner))
            self.eviction.add_done_callback(lambda _: freed())
        # Else it is on its way: called just now, or closing.

    async def next_token(self, now: float, limit_s: float) -> Token:
        """The inner engine's next token. Raises the fault of an interruption in place of its cancellation."""
        task = asyncio.current_task()
        if self.fault is not None:
            raise self.fault
        if task is None or self.inner is None:
            raise RuntimeError("tokens are read in a task, from an engine that was asked")
        before = task.cancelling()
        self.task, self.stall_at = task, now + limit_s
        try:
            token = await anext(self.inner)
        except StopAsyncIteration:
            raise EngineFault("the engine ended without saying why") from None
        finally:
            self.task, self.stall_at = None, math.inf
            if self.interrupted:
                self.interrupted = False
                if task.uncancel() <= before and self.fault is not None:
                    raise self.fault from None
        self.sent = True
        return token

    async def let_go(self) -> None:
        """The inner engine has given back what it held for this job. Fine to call twice."""
        inner, self.inner = self.inner, None
        if self.eviction is not None:
            await asyncio.wait((self.eviction,))
        elif inner is not None:
            await inner.aclose()


async def _closed(inner: AsyncGenerator[Token, None]) -> None:
    try:
        await inner.aclose()
    except Exception:
        log.exception("the engine failed while it let go of a sequence")
