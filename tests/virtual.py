"""Virtual time for loops: `run(coroutine)` on a loop whose sleeps cost nothing.

looptime's own pytest plug-in needs pytest-asyncio, which the project doesn't use; the loop alone is enough.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import looptime

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run to the end in virtual time; `loop.time()` starts at 0 and jumps from timer to timer. Ends as
    asyncio.run does: tasks that are left are cancelled and worker threads waited for, so that nothing of this
    test is seen by the next."""
    with asyncio.Runner(loop_factory=_loop) as runner:
        return runner.run(main)


def _loop() -> asyncio.AbstractEventLoop:
    return looptime.patch_event_loop(asyncio.new_event_loop(), start=0.0)
