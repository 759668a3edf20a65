"""The one thread in which an engine's steps run.

Law: owns the thread and hands things over; knows neither models nor asyncio. Everything that touches the core
happens in this thread: steps, calls that come between two steps (sleep, wake), and the end. It never waits
for anybody while holding the lock. Whatever is raised here, but in a call, is the engine's death, and told.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol, TypeVar

from services.faults import EngineDied
from services.llama.core import Core, Outcome, death
from services.llama.sequence import Sequence

log = logging.getLogger("weir.torch")
T = TypeVar("T")
Call = tuple[Future[Any], Callable[[], Any]]


class Owner(Protocol):
    """Who the worker works for; called in the worker's thread."""

    def deliver(self, outcomes: Seq[Outcome]) -> None:
        """What a step did."""

    def died(self, error: EngineDied) -> None:
        """There are no more steps: this is for all who wait, whatever they wait for."""

    def over(self) -> None:
        """The last thing that this thread does, dead or not: give everything back."""


class Worker:
    """dead: why there are no more steps."""

    def __init__(self, name: str, owner: Owner) -> None:
        self._owner = owner
        self._core: Core | None = None
        self._wake = threading.Condition()
        self._new: list[Sequence] = []
        self._calls: list[Call] = []
        self._busy = self._closing = self._cancelled = False
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

    def use(self, core: Core) -> None:
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

    def end(self) -> None:
        """After what it does now. One that hangs in a step can't be killed, and ends after it."""
        with self._wake:
            self._closing = True
            self._wake.notify()

    def ended(self, timeout_s: float) -> bool:
        """Waits for it; whether it did in time."""
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
            self._guarded(partial(self._admit, new))
            for call in calls:
                _answer(*call)
            self._guarded(self._step)
        for future, _ in calls:
            _answer(future, _closed)
        self._core = None
        try:
            self._owner.over()
        except Exception:
            log.exception("a closed engine could not give everything back")

    def _has_work(self) -> bool:
        return bool(self._busy or self._closing or self._new or self._calls or self._cancelled)

    def _admit(self, new: list[Sequence]) -> None:
        """The new ones in, the cancelled ones out."""
        if self._core is None or self.dead:
            error = EngineDied(self.dead or "the engine is not running")
            self._tell([Outcome(sequence, error=error) for sequence in new])
            return
        for sequence in new:
            self._core.add(sequence)
        self._core.reap()

    def _step(self) -> None:
        core, self._busy = self._core, False
        if core is None or self.dead:
            return
        if core.busy():
            self._tell(core.step())
        self._busy = core.busy()

    def _tell(self, outcomes: list[Outcome]) -> None:
        if outcomes:
            self._owner.deliver(outcomes)

    def _guarded(self, what: Callable[[], None]) -> None:
        try:
            what()
        except BaseException as error:  # a thread that just ended would leave everybody waiting
            log.exception("a step failed: the engine is dead")
            self._die(death(error))

    def _die(self, error: EngineDied) -> None:
        """All who wait hear it: also those whom the core no longer knows, because the step that failed had
        finished them."""
        self.dead = str(error)
        self._owner.died(error)
        if self._core is None:
            return
        try:
            for sequence in self._core.everyone():
                sequence.cancelled = True
            self._core.reap()
        except Exception:
            log.exception("a dead engine does not let go of its sequences; closing it will")


def _answer(future: Future[Any], what: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(what())
    except BaseException as error:  # it belongs to whoever waits for it
        future.set_exception(error)


def _closed() -> None:
    raise RuntimeError("the engine was closed")
