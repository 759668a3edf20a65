"""Brings back what is broken: an engine that died, an instance in quarantine, by a cold start, verified.

Law: one tick = one function. It waits before it tries, longer each time, so that Consul notices, people may
look, and an engine that dies at once doesn't burn the machine. A process that is gone is its supervisor's.
"""

from __future__ import annotations

import logging

from mesh.clock import Clock
from services.lifecycle import State
from services.pool.hotstart import HotPool

log = logging.getLogger("weir.pool")

EVERY_S = 0.5
FIRST_S, LONGEST_S = 10.0, 300.0
"""Before the first try: Consul takes three seconds to call it critical. Before any."""
WELL_S = 600.0
"""So long it must have run for the waiting to begin anew."""


def wait_s(failures: int) -> float:
    """Seconds to wait before the next try, after `failures` in a row."""
    return min(LONGEST_S, FIRST_S * 2.0 ** min(failures, 16))


class Medic:
    """Of one instance."""

    def __init__(self, pool: HotPool, clock: Clock) -> None:
        self._pool, self._clock = pool, clock
        self._ill_since: float | None = None
        self._well_since = clock.monotonic()
        self._tries = 0

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._clock.sleep(EVERY_S)
            await self.tick()

    async def tick(self) -> bool:
        """Whether a cold start was tried now."""
        instance, now = self._pool.parts.instance, self._clock.monotonic()
        if why := self._pool.parts.engine.stats().dead:
            # No request may have found out yet.
            instance.failed(why)
        if instance.lifecycle.leaving or instance.lifecycle.state not in (State.DEAD, State.QUARANTINED):
            self._ill_since = None
            if now - self._well_since >= WELL_S:
                self._tries = 0
            return False
        if self._ill_since is None:
            self._ill_since = now
        if now - self._ill_since < wait_s(self._tries):
            return False
        self._tries += 1
        outcome = await self._pool.wake()
        self._ill_since, self._well_since = None, self._clock.monotonic()
        log.info("cold start %d: %s", self._tries, outcome.error or "it serves again")
        return True
