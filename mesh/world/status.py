"""Gathering a world's status: supervisors, catalogs, status documents, all regions at once.

Law: reads only. A region that is down or doesn't answer is a fact, not an error.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from random import SystemRandom
from typing import Any

from mesh.clock import SystemClock
from mesh.consul import decode, keys
from mesh.consul.client import Consul
from mesh.consul.errors import ConsulError
from mesh.world.spec import SERVICE
from mesh.world.status_model import RegionFacts, status
from mesh.world.world import World
from regions.cli.errors import WeirError

CONSUL_S = 3.0


async def gather(world: World) -> dict[str, Any]:
    """The body of `weir status --json`."""
    names = world.spec.names
    found = await asyncio.gather(*(_facts(world, name) for name in names))
    return status(world.spec, str(world.ca_file), dict(zip(names, found, strict=True)))


async def _facts(world: World, region: str) -> RegionFacts:
    pid = world.supervisor(region)
    if pid is None:
        return RegionFacts(error="not running")
    try:
        seen = await asyncio.to_thread(world.control(region).region)
    except WeirError as error:
        return RegionFacts(supervisor=pid, error=error.why)
    processes = {name: row.state.value for name, row in seen.processes.items()}
    facts = RegionFacts(seen.ready, pid, processes, error=seen.trouble)
    try:
        async with asyncio.timeout(CONSUL_S):
            return await _ask_consul(world, region, facts)
    except (ConsulError, TimeoutError) as error:
        return replace(facts, error=f"Consul: {error or 'no answer'}")


async def _ask_consul(world: World, region: str, facts: RegionFacts) -> RegionFacts:
    address = world.address(region).consul_http
    async with Consul(address, world.token, clock=SystemClock(), rng=SystemRandom()) as consul:
        body = (await consul.get(f"/v1/health/connect/{SERVICE}")).body
        ends, _ = decode.endpoints(body, SERVICE, region)
        page = await consul.kv_list(keys.STATUS)
    documents = {}
    for entry in page.entries:
        document = _parse(entry.value)
        if document is not None and entry.key == keys.status(str(document.get("service")), region):
            documents[str(document["service"])] = document
    return replace(facts, endpoints=ends, documents=documents, resting=decode.resting(body))


def _parse(value: bytes) -> Mapping[str, Any] | None:
    """A status document; None when a stranger has written something else there."""
    try:
        body = json.loads(value)
    except ValueError:
        return None
    return body if isinstance(body, dict) else None
