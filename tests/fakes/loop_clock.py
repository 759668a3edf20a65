"""The Clock of a loop in virtual time (tests/virtual.py): its seconds are the loop's own."""

from __future__ import annotations

import asyncio


class LoopClock:
    """epoch_s: what `time()` adds; changing it is a jump of the wall clock."""

    def __init__(self, epoch_s: float = 1_700_000_000.0) -> None:
        self.epoch_s = epoch_s

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()

    def time(self) -> float:
        return self.epoch_s + self.monotonic()

    async def sleep(self, s: float) -> None:
        await asyncio.sleep(max(0.0, s))
