"""Brings back what is broken: an engine that died, an instance in quarantine, by a cold start, verified.

Law: one tick = one function. It waits before it tries, longer each time, so that Consul notices, people may
look, and an engine that dies at once doesn't burn the machine. A process that is gone is its supervisor's.
"""

from __future__ import annotations

import logging

from mesh.clock import Clock
from services.lifecycle import State
from services.pool.hotstart import HotPool
from services.pool.parts import PoolSettings

log = logging.getLogger("weir.pool")

WELL_S = 600.0
"""So long it must have run for the waiting to begin anew."""
NOT_TRIED = ("busy", "wrong_state")
"""Codes of a wake that was none: somebody else is at it, or was."""


def wait_s(failures: int, how: PoolSettings) -> float:
    """Seconds to wait before the next try, after `failures` in a row."""
    return min(how.heal_longest_s, how.heal_first_s * 2.0 ** min(failures, 16))


class Medic:
    """Of one instance. Needs no Consul."""

    EVERY_S = 0.5

    def __init__(self, pool: HotPool, clock: Clock) -> None:
        self._pool, self._clock = pool, clock
        self._ill_since: float | None = None
        self._well_since = clock.monotonic()
        self._tries = 0

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
        if now - self._ill_since < wait_s(self._tries, self._pool.parts.settings):
            return False
        outcome = await self._pool.wake()
        self._ill_since, self._well_since = None, self._clock.monotonic()
        if outcome.code in NOT_TRIED:
            return False
        self._tries += 1
        log.info("cold start %d: %s", self._tries, outcome.error or "it serves again")
        return True
