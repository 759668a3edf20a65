"""The answers under way, and how all of them are ended at once: told why, not merely cut.

Law: tasks and a reason; how that looks to a client is decided where answers are made. A client that leaves
cancels its task too, and that cancellation is never taken for ours.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

from services.openai_fields import ApiError


class Underway:
    """over: why no answer is made any more, once that is so."""

    def __init__(self) -> None:
        self.over: ApiError | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._told: set[asyncio.Task[Any]] = set()

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """Around one answer, in its own task. Raises `over` where the answer is ended, or was too late."""
        task = asyncio.current_task()
        if self.over is not None or task is None:
            raise self.over or RuntimeError("answers are made in a task")
        before = task.cancelling()
        self._tasks.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if task in self._told and task.uncancel() <= before and self.over is not None:
                raise self.over from None
            raise  # the client left
        finally:
            self._tasks.discard(task)
            self._told.discard(task)

    def end(self, why: ApiError) -> int:
        """End all, now and later ones; how many there were. The first reason stays."""
        self.over = self.over or why
        ended = self._tasks - self._told
        self._told |= ended
        for task in ended:
            task.cancel()
        return len(ended)
