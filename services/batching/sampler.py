"""Throughput in windows, and what follows from it: the governor of batch and delay.

Law: pure. A window ends when enough time has passed and enough steps were made that one step more or less is
no cliff; only a window in which work was always waiting says anything about the engine.
"""

from __future__ import annotations

import math
from typing import Generic, TypeVar

from services.batching.cliff import Cliff, step
from services.batching.core import Core
from services.batching.model import BatchingSettings, Ticket

T = TypeVar("T", bound=Ticket)
LONGEST = 10
"""Windows of so many sample_s end in any case: an engine that has all but stopped must be seen."""


class Governor(Generic[T]):
    """Reads the tokens made and throttles the core. `at`: when to look next, math.inf while all is idle."""

    def __init__(self, how: BatchingSettings, core: Core[T]) -> None:
        self._how, self._core = how, core
        self.state, self.tokens, self.at = Cliff(), 0, math.inf
        self._opened = 0.0
        # Halving 128 down to 8 is four times; under twice min_batch it is never.
        self._deepest = max(0, int(math.log2(max(1.0, core.limits.batch / how.min_batch))))

    @property
    def share(self) -> float:
        """Of the full batch that is in force."""
        return 1.0 / (1 << self.state.level)

    @property
    def capacity(self) -> float:
        """Share of the full batch that is in force, times the share of throughput that is left where a batch
        could not be halved: all that there is to tell of an engine that runs one sequence at a time."""
        return self.share * self.state.left

    def wake(self, now: float) -> None:
        """Somebody runs: measure from now on, unless it does already."""
        if self.at == math.inf:
            self._open(now)

    def look(self, now: float) -> None:
        """Close the window if it is time."""
        if now < self.at:
            return
        spent, sample_s, core = now - self._opened, self._how.sample_s, self._core
        full = self.tokens >= self._how.sample_steps * max(1, core.running)
        if not full and not core.slack and spent < LONGEST * sample_s:
            self.at = now + sample_s
            return
        before = self.state.level
        sample = None if core.slack else self.tokens / spent
        self.state = step(self.state, sample, self._how.cliff, self._deepest)
        if self.state.level != before:
            core.throttle(self.share, self._how.cliff.delay_factor**self.state.level)
        if core.running or self.state.level or self.state.before:
            self._open(now)
        else:
            self.at = math.inf

    def _open(self, now: float) -> None:
        self._opened, self.tokens, self.at = now, 0, now + self._how.sample_s
        self._core.slack = self._core.has_room
