"""The first things a new world needs in Consul: ACL tokens per role, and the shipped intentions.

Law: steps that may be repeated. What is there already is left as it is: intentions are only written
into a Consul that has none.
"""

from __future__ import annotations

from pathlib import Path

from mesh.consul import acl
from mesh.consul.client import Consul
from mesh.consul.doors import open_intentions
from mesh.world.desk import Step
from mesh.world.spec import SERVICE
from mesh.world.world import World


def first_steps(world: World, region: str, consul: Consul) -> tuple[Step, ...]:
    """In order. consul: the region's agent, with the management token when ACLs are on."""
    steps: list[Step] = []
    if world.spec.acl:
        steps.append(lambda: _tokens(world, region, consul))
    if region == world.spec.primary:
        steps.append(lambda: _intentions(world, consul))
    return tuple(steps)


async def _tokens(world: World, region: str, consul: Consul) -> None:
    """Primary: make policies and tokens. Elsewhere: wait until they have been replicated."""
    if region == world.spec.primary:
        await acl.provision(consul, (SERVICE,), world.secrets.roles)
        return
    for secret in world.secrets.roles.values():
        async with Consul(consul.address, secret, clock=consul.clock, rng=consul.rng) as itself:
            await itself.get("/v1/acl/token/self")  # 403 while it isn't known here


async def _intentions(world: World, consul: Consul) -> None:
    from intentions.load import load_intentions

    door = await open_intentions(consul, world.spec.primary)
    if not await door.list():
        await door.replace_all(load_intentions(Path(world.spec.intentions_file)))
