"""The real doors to the mesh: orders (traffic manager, plain KV), status documents, Envoy's counters.

Law: translates, decides nothing. Status documents are followed by blocking reads, one per region, in the
background: a region that is dead or frozen delays nobody.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import aiohttp

from mesh.clock import Clock
from mesh.consul import keys
from mesh.consul.client import Consul
from mesh.consul.errors import ConsulError
from mesh.traffic.manager import whoami
from mesh.traffic.proposal import Change
from mesh.world.traffic_hand import hand
from mesh.world.world import World

ROLE = "drill"
"""Role of mesh.consul.acl whose token a drill uses: moves traffic and keeps history, changes no intention."""

WAIT_S = 5.0
PAUSE_S = 0.25
FIRST_S = 2.0
ADMIN_S = 2.0
_RETRIES = re.compile(r"^cluster\.[^:]*\.upstream_rq_retry: (\d+)$", re.MULTILINE)


class LiveOrders:
    """drills.doors.Orders."""

    def __init__(self, world: World, agents: Mapping[str, Consul]) -> None:
        self._world, self._agents = world, agents

    async def evacuate(self, service: str, region: str, why: str) -> None:
        async with hand(self._world, self._elsewhere(region), ROLE) as found:
            await found.traffic.commit(await found.traffic.evacuate(service, region), self._change(why))

    async def restore(self, service: str, region: str, why: str) -> None:
        async with hand(self._world, self._elsewhere(region), ROLE) as found:
            if region not in (await found.traffic.outlook(service)).evacuated:
                return
            await found.traffic.commit(await found.traffic.restore(service, region), self._change(why))

    async def read_key(self, region: str, key: str) -> bytes | None:
        entry = await self._agents[region].kv_get(key)
        return None if entry is None else entry.value

    async def write_key(self, region: str, key: str, value: bytes | None) -> None:
        if value is None:
            await self._agents[region].kv_delete(key)
        else:
            await self._agents[region].kv_put(key, value)

    def _elsewhere(self, region: str) -> str:
        """An order about a region is given in another one, as people would."""
        return next((name for name in self._world.regions.names if name != region), region)

    @staticmethod
    def _change(why: str) -> Change:
        return Change(whoami(), why, source="drill")


class LiveStatuses:
    """drills.doors.Statuses. An async context manager: the follower tasks live as long as the block."""

    def __init__(self, world: World, agents: Mapping[str, Consul], service: str, clock: Clock) -> None:
        self._world, self._agents, self._service, self._clock = world, agents, service, clock
        self._latest: dict[str, Mapping[str, Any]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._asked = {region: asyncio.Event() for region in agents}

    async def __aenter__(self) -> Self:
        self._tasks = [
            asyncio.create_task(self._follow(region), name=f"status of {region}") for region in self._agents
        ]
        # Whoever asks first must not be told "no status" only because nobody has looked yet.
        waits = [asyncio.create_task(event.wait()) for event in self._asked.values()]
        _, pending = await asyncio.wait(waits, timeout=FIRST_S)
        for task in pending:
            task.cancel()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def documents(self, service: str) -> Mapping[str, Mapping[str, Any]]:
        return dict(self._latest)

    async def _follow(self, region: str) -> None:
        """Keep the newest document of one region; forget it while the region can't be asked."""
        prefix, index = keys.status(self._service, region), 0
        while True:
            try:
                async with asyncio.timeout(WAIT_S + 2.0):
                    page = await self._agents[region].kv_list(prefix, index=index, wait_s=WAIT_S)
                found = next((e for e in page.entries if e.key == prefix), None)
                body = json.loads(found.value) if found is not None else None
            except (ConsulError, TimeoutError, ValueError):
                self._latest.pop(region, None)
                self._asked[region].set()
                index = 0
                await self._clock.sleep(PAUSE_S)
                continue
            # An index that went backwards (a restored snapshot) means: start over.
            index = page.index if page.index >= index else 0
            if isinstance(body, dict):
                self._latest[region] = body
                self._asked[region].set()
            else:
                self._latest.pop(region, None)
                self._asked[region].set()
                await self._clock.sleep(PAUSE_S)

    async def retries(self, service: str) -> int | None:
        answers = await asyncio.gather(*(self._count(region) for region in self._world.regions.names))
        known = [a for a in answers if a is not None]
        return sum(known) if known else None

    async def _count(self, region: str) -> int | None:
        """Retries counted by one ingress gateway, None when its admin port doesn't answer."""
        url = f"{self._world.address(region).ingress_admin}/stats?filter=upstream_rq_retry$"
        timeout = aiohttp.ClientTimeout(total=ADMIN_S)
        try:
            async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url) as answer:
                text = await answer.text()
        except (aiohttp.ClientError, TimeoutError):
            return None
        return sum(int(n) for n in _RETRIES.findall(text))
