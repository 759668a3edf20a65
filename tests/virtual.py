"""Virtual time for loops: `run(coroutine)` on a loop whose sleeps cost nothing. Where real sockets and
processes take part: `run_leaping(coroutine)`, and `leap(seconds)` in it.

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


class _Leaping(asyncio.SelectorEventLoop):
    leapt_s = 0.0

    def time(self) -> float:
        return super().time() + self.leapt_s


def run_leaping(main: Coroutine[Any, Any, T]) -> T:
    """Run to the end in real time, but for what `leap` adds: so a test waits for no deadline, and none passes
    before the test says so."""
    with asyncio.Runner(loop_factory=_Leaping) as runner:
        return runner.run(main)


def leap(seconds: float) -> None:
    """Put the running loop's clock forward: what is due by then is due now."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, _Leaping)
    loop.leapt_s += seconds
