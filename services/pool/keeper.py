"""Keeps the pool small: an instance that is asleep beyond the eight that slept last on its device goes cold.

Law: each instance looks at Consul and decides about itself alone; all see the same rows, so all agree and
nobody has to be told. It asks the agent it is registered with: that one is on this host, knows its instances
of all services, and answers from memory. A Consul that doesn't answer is asked again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, Protocol

from mesh.consul.errors import ConsulError
from services.lifecycle import State
from services.pool.hotstart import HotPool
from services.pool.lru import to_cool
from services.pool.plan import sleepers

log = logging.getLogger("weir.pool")

ANSWER_S = 2.0


class Agent(Protocol):
    """What is needed of mesh.consul.client.Consul."""

    async def services(self) -> Mapping[str, Mapping[str, Any]]: ...


class Keeper:
    """Of one instance."""

    EVERY_S = 2.0

    def __init__(self, pool: HotPool, agent: Agent) -> None:
        self._pool, self._agent = pool, agent
        self._keep = pool.parts.settings.most_asleep

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
        if who.identity.instance not in to_cool(sleepers(rows), self._keep):
            return False
        # What comes of it the pool says itself; a wake that was faster is as good.
        log.info("more than %d sleep on this device, this one for longest", self._keep)
        return (await self._pool.cool()).ok
