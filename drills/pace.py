"""How time passes in a drill: in ticks that record, and that notice Ctrl-C.

Law: the only place of the drill room where a run waits. Decides nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from drills.recorder import Recorder
from mesh.clock import Clock

TICK_S = 0.1
T = TypeVar("T")


class Progress(Protocol):
    """Where the talk goes."""

    def phase(self, name: str, why: str) -> None: ...

    def tick(self, recorder: Recorder) -> None: ...

    def say(self, text: str) -> None: ...


@dataclass(slots=True)
class Stop:
    """Ctrl-C. `asked`: heal and report. `abandoned` (the second one): stop at once, say what is left."""

    asked: asyncio.Event = field(default_factory=asyncio.Event)
    abandoned: asyncio.Event = field(default_factory=asyncio.Event)


class Interrupted(Exception):
    """The person asked to stop."""


class Pace:
    def __init__(self, clock: Clock, recorder: Recorder, say: Progress, stop: Stop) -> None:
        self._clock, self._recorder, self._say, self._stop = clock, recorder, say, stop

    async def until(self, deadline: float) -> None:
        """Let time pass to `deadline` (monotonic). Raises Interrupted when the person asked to stop."""
        while True:
            if self._stop.asked.is_set():
                raise Interrupted
            await self.tick()
            left = deadline - self._clock.monotonic()
            if left <= 0:
                return
            await self._clock.sleep(min(TICK_S, left))

    async def during(self, work: Coroutine[Any, Any, T], *, healing: bool = False) -> T:
        """Await `work` while recording goes on.

        Ctrl-C cancels it and raises Interrupted; a healing is cancelled by the second Ctrl-C only.
        """
        order = self._stop.abandoned if healing else self._stop.asked
        task = asyncio.create_task(work)
        try:
            while not task.done():
                if order.is_set():
                    raise Interrupted
                await self.tick()
                nap = asyncio.create_task(self._clock.sleep(TICK_S))
                await asyncio.wait({task, nap}, return_when=asyncio.FIRST_COMPLETED)
                nap.cancel()
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def tick(self) -> None:
        await self._recorder.tick()
        self._say.tick(self._recorder)
