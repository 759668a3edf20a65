"""How an executor ends: told by a signal, at once by a second one, and never held up by its engine.

Law: listens to signals and waits; what a drain is, and when it is over, is services/registration.py's.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from typing import Any

from services.engine import Engine

log = logging.getLogger("weir.executor")

CLOSE_S = 5.0
"""Longest goodbye of the engine; what it holds goes with the process in any case."""


class Stop:
    """asked: drain and end. now: end at once."""

    def __init__(self) -> None:
        self.asked, self.now = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signal)

    def _signal(self) -> None:
        (self.now if self.asked.is_set() else self.asked).set()


async def unless(event: asyncio.Event, work: asyncio.Future[Any], *, cancel: bool = True) -> None:
    """Until `work` is done or `event` is set; what `work` raises, this raises."""
    waiting = asyncio.ensure_future(event.wait())
    await asyncio.wait((work, waiting), return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if work.done():
        work.result()
    elif cancel:
        work.cancel()
        await asyncio.wait((work,))


async def goodbye(engine: Engine) -> None:
    """Close it, or leave it to the end of the process."""
    try:
        async with asyncio.timeout(CLOSE_S):
            await engine.close()
    except TimeoutError:
        log.warning("the engine did not close within %g s", CLOSE_S)
