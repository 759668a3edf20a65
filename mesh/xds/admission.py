"""First answers to many streams at once: a bounded number at a time, the rest in a jittered line.

Law: shell. Queues hold nothing but waiting streams, whose number the server bounds. A stream that does not
read its first answer loses its place after `PATIENCE_S` but keeps its stream: a slow client must not hold
up the others.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from mesh.clock import Clock

AT_ONCE = 64
JITTER_S = 0.2
PATIENCE_S = 1.0


class Admission:
    """A line for first answers. `waiting` counts the streams in it."""

    def __init__(self, clock: Clock, rng: random.Random, at_once: int = AT_ONCE) -> None:
        self._clock, self._rng = clock, rng
        self._places = asyncio.Semaphore(at_once)
        self.waiting = 0

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Hold a place while the first answer is built and written, for at most PATIENCE_S."""
        self.waiting += 1
        try:
            if self._places.locked():
                # A full house means a storm (restart of this process, a cut healed): spread it, so that the
                # streams already served get their turn on the loop in between.
                await self._clock.sleep(self._rng.uniform(0.0, JITTER_S))
            await self._places.acquire()
        finally:
            self.waiting -= 1
        place = _Place(self._places)
        timer = asyncio.get_running_loop().call_later(PATIENCE_S, place.give_back)
        try:
            yield
        finally:
            timer.cancel()
            place.give_back()


class _Place:
    def __init__(self, places: asyncio.Semaphore) -> None:
        self._places: asyncio.Semaphore | None = places

    def give_back(self) -> None:
        """Idempotent."""
        if self._places is not None:
            self._places.release()
            self._places = None
