"""Who watches an instance by itself: the medic, and beside a Consul the keeper; round after round.

Law: a round that fails is logged with its traceback and the next one comes, later each time: neither a bug
nor an error ends the watching unnoticed. The executor serves on: traffic is worth more than its watchers.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from mesh.clock import Clock
from services.pool.hotstart import HotPool
from services.pool.keeper import Agent, Keeper
from services.pool.medic import Medic

log = logging.getLogger("weir.pool")

LONGEST_S = 60.0


@dataclass(frozen=True, slots=True)
class Watcher:
    """round: one look, whatever it answers. every_s: between two looks."""

    name: str
    round: Callable[[], Awaitable[object]]
    every_s: float

    async def run(self, clock: Clock) -> None:
        """Until cancelled."""
        failures = 0
        while True:
            await clock.sleep(min(max(LONGEST_S, self.every_s), self.every_s * 2.0 ** min(failures, 16)))
            try:
                await self.round()
                failures = 0
            except Exception:
                failures += 1
                log.exception("the %s's round failed, %d in a row; it goes on", self.name, failures)


def watchers(pool: HotPool, agent: Agent | None, clock: Clock) -> tuple[Watcher, ...]:
    """agent: of this host. Without one nobody knows of other sleepers, so there is no keeper: an instance on
    its own that sleeps stays asleep, and is healed all the same."""
    found = [Watcher("medic", Medic(pool, clock).tick, Medic.EVERY_S)]
    if agent is not None:
        found.append(Watcher("keeper", Keeper(pool, agent).tick, Keeper.EVERY_S))
    return tuple(found)
