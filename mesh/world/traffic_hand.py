"""The traffic manager on a local world: clients for every region that answers, and which ones don't.

Law: opens and closes; the manager does the work.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from mesh.catalog import load_services
from mesh.clock import SystemClock
from mesh.consul.client import Consul
from mesh.consul.errors import ConsulError
from mesh.traffic.manager import Traffic
from mesh.world.world import World
from regions.cli.errors import WeirError

ANSWER_S = 2.0


@dataclass(frozen=True, slots=True)
class Hand:
    """traffic: over the regions that answer. silent: regions whose Consul does not, with the reason."""

    traffic: Traffic
    silent: dict[str, str]


@asynccontextmanager
async def hand(world: World, here: str = "", role: str = "operator") -> AsyncIterator[Hand]:
    """The hand, seated in region `here` if that answers, else in the first region that does.

    role: of mesh.consul.acl, whose token is used when the world runs with ACLs.

    Raises WeirError when no region's Consul answers.
    """
    clock = SystemClock()
    async with AsyncExitStack() as stack:
        agents: dict[str, Consul] = {}
        for region in world.regions.names:
            client = Consul(world.address(region).consul_http, world.token_of(role), clock=clock)
            agents[region] = await stack.enter_async_context(client)
        reasons = await asyncio.gather(*(_silent(agent) for agent in agents.values()))
        silent = {r: why for r, why in zip(agents, reasons, strict=True) if why}
        alive = {r: agent for r, agent in agents.items() if r not in silent}
        if not alive:
            what = f"world {world.folder}"
            raise WeirError(what, "no region's Consul answers", f"weir up --dir {world.folder}")
        seat = here if here in alive else next(iter(alive))
        services = load_services(Path(world.spec.services_dir))
        yield Hand(Traffic(alive, seat, world.regions, services, clock), silent)


async def _silent(agent: Consul) -> str:
    """Why this agent can't be used; "" when it answers and its datacenter has a leader."""
    try:
        async with asyncio.timeout(ANSWER_S):
            leader = (await agent.get("/v1/status/leader")).body
    except TimeoutError:
        return f"no answer within {ANSWER_S:g} s"
    except ConsulError as error:
        return error.why
    return "" if leader else "no leader"
