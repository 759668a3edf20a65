"""Keeps the pool small: an instance that is asleep beyond the eight that slept last on its device goes cold.

Law: each instance looks at Consul and decides about itself alone; all see the same rows, so all agree and
nobody has to be told. One tick = one function; a Consul that doesn't answer is asked again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, Protocol

from mesh.clock import Clock
from mesh.consul.errors import ConsulError
from services.lifecycle import State
from services.pool.hotstart import HotPool
from services.pool.lru import MOST_ASLEEP, to_cool
from services.pool.plan import sleepers

log = logging.getLogger("weir.pool")

EVERY_S = 2.0
ANSWER_S = 2.0


class Agent(Protocol):
    """What is needed of mesh.consul.client.Consul."""

    async def services(self) -> Mapping[str, Mapping[str, Any]]: ...


class Keeper:
    """Of one instance. keep: most that sleep on one device."""

    def __init__(self, pool: HotPool, agent: Agent, clock: Clock, keep: int = MOST_ASLEEP) -> None:
        self._pool, self._agent, self._clock, self._keep = pool, agent, clock, keep

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._clock.sleep(EVERY_S)
            await self.tick()

    async def tick(self) -> bool:
        """Whether this instance went cold now."""
        who = self._pool.parts.instance
        if who.lifecycle.state is not State.ASLEEP:
            return False
        try:
            async with asyncio.timeout(ANSWER_S):
                rows = await self._agent.services()
        except (ConsulError, TimeoutError) as error:
            log.debug("the pool can't be read: %s", error)
            return False
        if who.identity.instance not in to_cool(sleepers(rows, who.identity.service), self._keep):
            return False
        outcome = await self._pool.cool()
        log.info("went cold: more than %d sleep on this device", self._keep)
        return outcome.ok
