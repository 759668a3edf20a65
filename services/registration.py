"""Keep one instance true in its region's Consul: register, stay registered, drain, leave.

Law: one tick = one function; the loop only sleeps and calls it. The executor serves whether Consul answers or
not. Drain first: Consul says DRAINING before anything stops, then requests under way finish (bounded), then
the registration goes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from mesh.clock import Clock
from mesh.consul import register
from mesh.consul.errors import ConsulError

log = logging.getLogger("weir.registration")

TICK_S = 1.0
"""How often the agent is asked whether it still knows us: a restarted agent is noticed within this."""
PROPAGATE_S = 0.3
"""After DRAINING stands in Consul, the ingresses know within this; only then is counted what is left."""


class Agent(Protocol):
    """What is needed of mesh.consul.client.Consul."""

    async def register(self, body: Any) -> None: ...
    async def deregister(self, service_id: str) -> None: ...
    async def get(self, path: str) -> Any: ...


class Registration:
    """The registration of one instance and its sidecar.

    idle: an event that is set while no request is under way.
    """

    def __init__(self, agent: Agent, it: register.Instance, clock: Clock) -> None:
        self._agent, self._it, self._clock = agent, it, clock
        self.known = False
        self.gone = False

    async def tick(self) -> bool:
        """Make sure that the agent knows us as we are. False when it couldn't be asked."""
        try:
            if not self.gone and not await self._stands():
                await self._agent.register(register.instance(self._it))
                log.info("registered %s (%s)", self._it.id, self._it.lifecycle)
        except ConsulError as error:
            if self.known:
                log.warning("Consul doesn't answer (%s); serving on", error.why)
            self.known = False
            return False
        self.known = True
        return True

    async def run(self) -> None:
        """Until cancelled: a tick a second; quicker while the agent is away, to use its return."""
        while True:
            await self._clock.sleep(TICK_S if await self.tick() else TICK_S / 4)

    async def drain(self, idle: asyncio.Event, deadline_s: float, in_flight: Callable[[], int]) -> int:
        """DRAINING in Consul, then wait until idle, `deadline_s` at most. Returns what is left."""
        self._it = replace(self._it, lifecycle=register.DRAINING)
        if await self.tick():
            await self._clock.sleep(PROPAGATE_S)
        try:
            async with asyncio.timeout(deadline_s):
                await idle.wait()
        except TimeoutError:
            log.warning("drain deadline of %g s passed with %d requests under way", deadline_s, in_flight())
        return in_flight()

    async def leave(self) -> None:
        """Take the registration away. A Consul that is down forgets us by the failing check instead."""
        self.gone = True
        try:
            await self._agent.deregister(self._it.id)
        except ConsulError as error:
            log.warning("not deregistered: %s", error.why)

    async def _stands(self) -> bool:
        """Whether the agent has this very registration: both services and our lifecycle."""
        mine = (await self._agent.get(f"/v1/agent/service/{self._it.id}")).body
        if not mine or (mine.get("Meta") or {}).get("lifecycle") != self._it.lifecycle:
            return False
        return bool((await self._agent.get(f"/v1/agent/service/{register.sidecar_id(self._it.id)}")).body)
