"""The one thread in which an engine's steps run.

Law: owns the thread and hands things over; knows neither models nor asyncio. Everything that touches the core
happens in this thread: steps, and calls that come between two steps (sleep, wake). It never waits for anybody
while holding the lock.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from typing import Any, TypeVar

from services.faults import EngineDied
from services.llama.core import Core, Outcome, death
from services.llama.sequence import Sequence

log = logging.getLogger("weir.torch")
T = TypeVar("T")


class Worker:
    """deliver: called in this thread with the outcomes of each step. dead: why there are no more steps."""

    def __init__(self, name: str, deliver: Callable[[Seq[Outcome]], None]) -> None:
        self._deliver = deliver
        self._core: Core | None = None
        self._wake = threading.Condition()
        self._new: list[Sequence] = []
        self._calls: list[tuple[Future[Any], Callable[[], Any]]] = []
        self._closing = self._cancelled = False
        self.dead = ""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, what: Callable[[], T]) -> Future[T]:
        """Run it between two steps."""
        future: Future[T] = Future()
        with self._wake:
            if self._closing:
                future.set_exception(RuntimeError("the engine is closed"))
            else:
                self._calls.append((future, what))
                self._wake.notify()
        return future

    def use(self, core: Core | None) -> None:
        """Drive this one from now on. In the worker's thread only, that is by `call`."""
        self._core = core

    def submit(self, sequence: Sequence) -> None:
        with self._wake:
            self._new.append(sequence)
            self._wake.notify()

    def cancel(self, sequence: Sequence) -> None:
        """Its slot and blocks are free before the next step; at once when nothing else runs."""
        with self._wake:
            sequence.cancelled = self._cancelled = True
            self._wake.notify()

    def close(self, timeout_s: float) -> bool:
        """Whether the thread ended in time; one that hangs in a step can't be killed."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(self._has_work)
                new, self._new = self._new, []
                calls, self._calls = self._calls, []
                self._cancelled = False
                if self._closing:
                    break
            self._turn(new, calls)
        for future, _ in calls:
            future.set_exception(RuntimeError("the engine was closed"))

    def _has_work(self) -> bool:
        stepping = self._core is not None and not self.dead and self._core.busy()
        return bool(stepping or self._closing or self._new or self._calls or self._cancelled)

    def _turn(self, new: list[Sequence], calls: list[tuple[Future[Any], Callable[[], Any]]]) -> None:
        core = self._core
        if core is not None:
            for sequence in new:
                core.add(sequence)
            core.reap()
        elif new:
            self._tell([Outcome(s, error=EngineDied("the engine is not running")) for s in new])
        for future, what in calls:
            _answer(future, what)
        if self._core is None:
            return
        if self.dead:
            self._tell([Outcome(s, error=EngineDied(self.dead)) for s in new])
        elif self._core.busy():
            self._step(self._core)

    def _step(self, core: Core) -> None:
        try:
            outcomes = core.step()
        except Exception as error:
            log.exception("a step failed: the engine is dead")
            reason = death(error)
            self.dead = str(reason)
            outcomes = [Outcome(s, error=reason) for s in core.everyone()]
            for outcome in outcomes:
                outcome.sequence.cancelled = True
            core.reap()
        self._tell(outcomes)

    def _tell(self, outcomes: list[Outcome]) -> None:
        if outcomes:
            self._deliver(outcomes)


def _answer(future: Future[Any], what: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(what())
    except BaseException as error:  # it belongs to whoever waits for it
        future.set_exception(error)
