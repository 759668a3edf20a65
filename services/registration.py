"""Keep one instance true in its region's Consul: register, stay registered, drain, leave.

Law: one tick = one function; the loop only sleeps and calls it. The executor serves whether Consul answers or
not. Drain first: Consul says DRAINING before anything stops, then requests under way finish (bounded), then
the registration goes. Time and chance are handed in.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Protocol

from mesh.clock import Clock
from mesh.consul import register
from mesh.consul.errors import BadRequest, ConsulError

log = logging.getLogger("weir.registration")

TICK_S = 1.0
"""How often the agent is asked whether it still knows us."""
FIRST_RETRY_S, MAX_RETRY_S = 0.1, 1.0
"""Back-off while the agent is away. It is our own agent on our own host, and what waits is traffic."""
CALL_S = 5.0
"""Longest one tick: a frozen agent holds the connection open and says nothing."""
LEAVE_S = 2.0
QUIET_POLL_S = 0.05
_NOT_FOUND = 404


class Agent(Protocol):
    """What is needed of mesh.consul.client.Consul."""

    async def register(self, body: Mapping[str, Any]) -> None: ...
    async def deregister(self, service_id: str) -> None: ...
    async def get(self, path: str) -> Any: ...


@dataclass(frozen=True, slots=True)
class Drain:
    """How to drain. deadline_s: longest time in all. settle_s: so long nothing may have been in flight after
    Consul said DRAINING: the ingresses of all regions hear of it within that time, and a pause between two
    requests is no proof that they stopped sending."""

    deadline_s: float = 10.0
    settle_s: float = 0.5


def retry_s(failures: int, rng: Random) -> float:
    """Seconds to the next try after `failures` (>= 1) in a row: doubling, jittered, at most MAX_RETRY_S."""
    return min(MAX_RETRY_S, FIRST_RETRY_S * 2.0 ** min(failures - 1, 16)) * rng.uniform(0.5, 1.0)


def same(seen: Mapping[str, Any] | None, wanted: Mapping[str, Any]) -> bool:
    """Whether what the agent holds (`/v1/agent/service/<id>`) is what the body `wanted` registers."""
    if seen is None:
        return False
    keys = ("Address", "Port", "Meta")
    return all((seen.get(key) or None) == (wanted.get(key) or None) for key in keys)


async def quiet(how: Drain, in_flight: Callable[[], int], clock: Clock) -> int:
    """Wait until nothing was in flight for the settle time, or the deadline. Returns what is left."""
    end = clock.monotonic() + how.deadline_s
    idle_since: float | None = None
    while (now := clock.monotonic()) < end:
        idle_since = None if in_flight() else now if idle_since is None else idle_since
        if idle_since is not None and now - idle_since >= how.settle_s:
            break
        await clock.sleep(min(QUIET_POLL_S, end - now))
    if left := in_flight():
        log.warning("drain deadline passed with %d requests in flight", left)
    return in_flight()


class Registration:
    """The registration of one instance and its sidecar. `known`: the agent knew us at the last tick."""

    def __init__(self, agent: Agent, it: register.Instance, clock: Clock, rng: Random) -> None:
        self._agent, self._it, self._clock, self._rng = agent, it, clock, rng
        self._lock = asyncio.Lock()
        self._first, self._leaving = True, False
        self._failures = 0
        self.known = self.gone = False

    async def tick(self) -> bool:
        """Make sure that the agent knows us as we are. False when it couldn't be asked."""
        # One at a time: a READY on its way must not arrive after the DRAINING that overtook it.
        async with self._lock:
            try:
                async with asyncio.timeout(CALL_S):
                    await self._reconcile()
            except (ConsulError, TimeoutError) as error:
                self._failed(error)
                return False
        if self._failures:
            log.info("Consul answers again")
        self.known, self._failures = True, 0
        return True

    async def run(self) -> None:
        """Until cancelled: a tick a second, sooner while the agent is away, to use its return."""
        while True:
            good = await self.tick()
            await self._clock.sleep(TICK_S if good else retry_s(self._failures, self._rng))

    @property
    def lifecycle(self) -> str:
        """What Consul has been told, or will be at the next tick that works."""
        return self._it.lifecycle

    def place(self, device: str) -> None:
        """From the next tick on this device is told."""
        self._it = replace(self._it, device=device)

    async def become(self, lifecycle: str, slept_at: int = 0, within_s: float = CALL_S) -> bool:
        """Tell Consul now. False when it couldn't be told in time; then `run` goes on trying.

        One that is leaving says DRAINING to its end, whatever else is wished.
        """
        if self._leaving:
            lifecycle, slept_at = register.DRAINING, 0
        self._it = replace(self._it, lifecycle=lifecycle, slept_at=slept_at)
        try:
            async with asyncio.timeout(within_s):
                return await self.tick()
        except TimeoutError:
            log.warning("Consul did not answer within %g s", within_s)
            return False

    async def drain(self, how: Drain, in_flight: Callable[[], int]) -> int:
        """DRAINING in Consul, then wait until nothing is in flight. Returns what is left at the deadline.

        When Consul can't be told, the wait is the same: the mesh may still be sending.
        """
        self._leaving = True
        started = self._clock.monotonic()
        await self.become(register.DRAINING, within_s=how.deadline_s / 2)
        spent = self._clock.monotonic() - started
        return await quiet(Drain(how.deadline_s - spent, how.settle_s), in_flight, self._clock)

    async def leave(self, within_s: float = LEAVE_S) -> None:
        """Take the registration away. A Consul that is down forgets us by the failing check instead."""
        self.gone = True
        await self._within(within_s, self._deregister())

    async def _deregister(self) -> None:
        async with self._lock:
            try:
                await self._agent.deregister(self._it.id)
            except ConsulError as error:
                log.warning("not deregistered: %s", error.why)

    async def _within(self, limit_s: float, work: Coroutine[Any, Any, Any]) -> None:
        try:
            async with asyncio.timeout(limit_s):
                await work
        except TimeoutError:
            log.warning("Consul did not answer within %g s", limit_s)

    async def _reconcile(self) -> None:
        if self.gone:
            return
        body = register.instance(self._it)
        # The first time always: the agent may remember an earlier run of this id, critical checks and all.
        if self._first or not await self._stands(body):
            await self._agent.register(body)
            self._first = False
            log.info("registered %s (%s)", self._it.id, self._it.lifecycle)

    async def _stands(self, body: Mapping[str, Any]) -> bool:
        """Whether the agent holds both services as `body` has them."""
        sidecar = body["Connect"]["SidecarService"]
        return same(await self._held(self._it.id), body) and same(
            await self._held(register.sidecar_id(self._it.id)), sidecar
        )

    async def _held(self, service_id: str) -> Mapping[str, Any] | None:
        try:
            held: Mapping[str, Any] | None = (await self._agent.get(f"/v1/agent/service/{service_id}")).body
            return held
        except BadRequest as error:
            # The agent's own endpoints answer 404 without an index, which `get` takes for a wrong path.
            if error.status == _NOT_FOUND:
                return None
            raise

    def _failed(self, error: Exception) -> None:
        if not self._failures:
            why = error.why if isinstance(error, ConsulError) else f"no answer within {CALL_S:g} s"
            log.warning("Consul can't be kept informed (%s); serving on", why)
        self.known, self._failures = False, self._failures + 1
