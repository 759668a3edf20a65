"""How far loading is: to the caller after every read, to the log once a second.

Law: counts what it is told; time is an argument.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from mesh.clock import Clock

log = logging.getLogger("weir.weights")
EVERY_S = 1.0

Progress = Callable[[int, int], None]


class Meter:
    """total: bytes. what: for the log. Not for several threads at once."""

    def __init__(self, what: str, total: int, progress: Progress | None, clock: Clock) -> None:
        self._what, self._total, self._progress, self._clock = what, total, progress, clock
        self._started = self._said = clock.monotonic()
        self._done = 0

    def add(self, nbytes: int) -> None:
        self._done += nbytes
        if self._progress is not None:
            self._progress(self._done, self._total)
        now = self._clock.monotonic()
        if now - self._said >= EVERY_S:
            self._said = now
            rate = self._done / max(now - self._started, 1e-9)
            log.info(
                "%s: %d of %d MiB, %.2f GB/s", self._what, self._done >> 20, self._total >> 20, rate / 1e9
            )

    @property
    def seconds(self) -> float:
        return self._clock.monotonic() - self._started
