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
    with asyncio.Runner(loop_factory=_Virtual) as runner:
        return runner.run(main)


class _Virtual(looptime.LoopTimeEventLoop, asyncio.SelectorEventLoop):
    """Time stands still while a worker thread is at work: looptime lets it go on by then, and how far a story
    has come when the thread is done would be a matter of the machine's load."""

    def __init__(self) -> None:
        super().__init__(start=0.0)
        self._at_work = set[asyncio.Future[Any]]()
        self._look, self._selector.select = self._selector.select, self._wait  # type: ignore[method-assign]

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        future = super().run_in_executor(executor, func, *args)
        self._at_work.add(future)
        future.add_done_callback(self._at_work.discard)
        return future

    def _wait(self, timeout: float | None = None) -> Any:
        if self._at_work and timeout != 0:
            return type(self._selector).select(self._selector, None)  # its end wakes the loop
        return self._look(timeout)


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
