"""With ACLs, a new secondary waits until the primary knows its replication token.

Law: waits, bounded, and changes nothing. Why: a secondary of Consul 1.8.7 whose first request to have its
Connect CA signed is refused ("ACL not found") seems to ask again only when the roots change; until then every
leaf of the region fails with "error parsing CA cert: no PEM-encoded data found". That error was seen once in
some thirty worlds; the refusal before it is inferred, not seen.
"""

from __future__ import annotations

import logging

from mesh.clock import Clock
from mesh.consul.client import Consul
from mesh.consul.errors import ConsulError
from mesh.world.world import World

log = logging.getLogger("weir.world")
PATIENCE_S = 60.0
POLL_S = 0.1
ROLE = "replication"


def must_wait(world: World, region: str) -> bool:
    """Whether this is a region whose CA is still to be signed by a primary with ACLs."""
    signed = (world.layout.region(region).consul_data / "raft").exists()
    return world.spec.acl and region != world.spec.primary and not signed


async def token_known(world: World, region: str, clock: Clock) -> None:
    """Until the primary answers to the replication token; after PATIENCE_S go on, and Consul says why."""
    if not must_wait(world, region):
        return
    end = clock.monotonic() + PATIENCE_S
    address = world.address(world.spec.primary).consul_http
    async with Consul(address, world.secrets.roles[ROLE], clock=clock) as primary:
        while clock.monotonic() < end:
            try:
                await primary.get("/v1/acl/token/self")
            except ConsulError:
                await clock.sleep(POLL_S)
                continue
            return
    log.warning("%s: the primary does not know the replication token after %g s", region, PATIENCE_S)
