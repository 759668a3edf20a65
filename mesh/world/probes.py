"""Is it ready? Asked over HTTP, one short request per question.

Law: answers yes or no; any failure is a no. Waiting and repeating are the caller's.
"""

from __future__ import annotations

import asyncio
from random import Random

import aiohttp

from mesh.clock import Clock
from mesh.consul.client import Consul
from mesh.consul.decode import DecodeError
from mesh.consul.errors import ConsulError
from mesh.world.plan import Probe, ProbeKind

TIMEOUT_S = 1.0


class Probes:
    """All questions a supervisor asks. `consul` is the region's own agent, with the operator's token."""

    def __init__(self, consul: Consul) -> None:
        self._consul = consul
        self._http: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()

    async def __call__(self, probe: Probe) -> bool:
        if probe.kind is ProbeKind.HTTP:
            return await self._answers(probe.url)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                if probe.kind is ProbeKind.CONSUL:
                    return await self._has_leader()
                return await self._knows(probe.what, probe.digest)
        except (ConsulError, DecodeError, TimeoutError):
            return False

    async def _answers(self, url: str) -> bool:
        if self._http is None:
            self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S))
        try:
            async with self._http.get(url) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def _has_leader(self) -> bool:
        """A leader, and Connect roots: a secondary has none before it has spoken to the primary."""
        leader = (await self._consul.get("/v1/status/leader")).body
        if not leader:
            return False
        _, roots = await self._consul.roots()
        return bool(roots.pems)

    async def _knows(self, service_id: str, digest: str) -> bool:
        answer = await self._consul.get(f"/v1/agent/service/{service_id}")
        return answer.body is not None and answer.body["Meta"].get("xds_token_sha256") == digest

    async def passing(self, service: str) -> int:
        """How many Connect proxies of a service pass their checks in this region; 0 when nobody can say."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                answer = await self._consul.get(f"/v1/health/connect/{service}", {"passing": "true"})
        except (ConsulError, TimeoutError):
            return 0
        return len(answer.body or [])


async def has_leader(url: str, token: str, *, clock: Clock, rng: Random) -> bool:
    """One question to one agent: leader and Connect roots there?"""
    async with Consul(url, token, clock=clock, rng=rng) as consul:
        return await Probes(consul)(Probe(ProbeKind.CONSUL, url))
