"""Time as an argument: the Clock that every shell part is handed, and the one that is real.

Law: the sole importer of `time` in the project. Pure modules take seconds as plain numbers and never
see a Clock.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """What a loop may ask of time. All values are seconds."""

    def monotonic(self) -> float:
        """Seconds since some fixed point; never goes back. For ages, timeouts and rates."""

    def time(self) -> float:
        """Unix seconds. For stamps that people or other machines read; may jump."""

    async def sleep(self, s: float) -> None:
        """Let `s` seconds pass; zero or less only yields to the loop."""


class SystemClock:
    """The machine's clock."""

    def monotonic(self) -> float:
        return time.monotonic()

    def time(self) -> float:
        return time.time()

    async def sleep(self, s: float) -> None:
        await asyncio.sleep(max(0.0, s))
