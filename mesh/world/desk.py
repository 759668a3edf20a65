"""What a supervisor does in its region's Consul: first rights and rules, then the gateways' registrations.

Law: every step may be repeated and changes nothing that is there already. Errors are ConsulErrors; trying
again is the caller's.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from mesh.consul import register
from mesh.consul.client import Consul
from mesh.world.addresses import INGRESS_HTTP, INGRESS_HTTPS, MESH_GATEWAY
from mesh.world.layout import RegionLayout
from mesh.world.probes import Probes
from mesh.world.spec import SERVICE, WorldSpec
from mesh.xds.names import META_HTTP_PORT, META_TLS_SDS

Step = Callable[[], Awaitable[None]]


class Desk:
    """consul: for the first steps and for reading. gateways: for registering them, by service name: the agent
    keeps a registration's token and goes on using it, so it must be the gateway's own.
    first: steps to be done once after the first leader (ACLs, intentions), in order.
    """

    def __init__(
        self,
        spec: WorldSpec,
        paths: RegionLayout,
        digests: Mapping[str, str],
        consul: Consul,
        gateways: Mapping[str, Consul],
        first: tuple[Step, ...] = (),
    ) -> None:
        region, where = paths.name, spec.addresses(paths.name)
        ingress_id, mesh_id = f"{region}-ingress", f"{region}-mesh-gateway"
        ingress = register.ingress(region, where.ingress, INGRESS_HTTPS, digests[ingress_id])
        ingress["Meta"][META_TLS_SDS] = str(paths.world.ingress_sds)
        if spec.http:
            ingress["Meta"][META_HTTP_PORT] = str(INGRESS_HTTP)
        self._bodies: dict[str, dict[str, Any]] = {
            ingress_id: ingress,
            mesh_id: register.mesh_gateway(region, where.mesh_gateway, MESH_GATEWAY, digests[mesh_id]),
        }
        self._consul, self._gateways, self._probes = consul, gateways, Probes(consul)
        self._left = list(first)
        self._expected = spec.total

    async def open(self) -> None:
        """Everything that must stand before the control plane starts. Goes on where it failed before."""
        while self._left:
            await self._left[0]()
            self._left.pop(0)
        # Always written: the registration that Consul kept from the last run names old tokens.
        for body in self._bodies.values():
            await self._gateways[body["Name"]].register(body)

    async def keep(self) -> None:
        """Register again what the agent has lost: data wiped, or a gateway forgotten after an hour down."""
        known = await self._consul.services()
        for id_, body in self._bodies.items():
            if id_ not in known:
                await self._gateways[body["Name"]].register(body)

    async def healthy(self) -> bool:
        """Whether every instance of the region passes its checks in Consul."""
        return await self._probes.passing(SERVICE) >= self._expected
