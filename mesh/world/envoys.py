"""The bootstrap of each Envoy of a region, from the world's description.

Law: pure; fills mesh.xds.bootstrap with the address plan.
"""

from __future__ import annotations

from typing import Any

from mesh.model import ProxyKind
from mesh.world.addresses import ADMIN, INGRESS_METRICS
from mesh.world.layout import RegionLayout
from mesh.world.plan import ProxyPlan
from mesh.world.spec import SERVICE, WorldSpec
from mesh.xds.bootstrap import ProxyIdentity, bootstrap

_GATEWAY_SERVICES = {ProxyKind.INGRESS: "ingress-gateway", ProxyKind.MESH_GATEWAY: "mesh-gateway"}


def bootstrap_of(spec: WorldSpec, paths: RegionLayout, proxy: ProxyPlan, token: str) -> dict[str, Any]:
    """Bootstrap JSON of one Envoy. Secret: it holds the token."""
    kind = ProxyKind(proxy.kind)
    member = next((m for m in spec.members(paths.name) if m.sidecar_id == proxy.id), None)
    who = ProxyIdentity(
        id=proxy.id,
        kind=kind,
        service=_GATEWAY_SERVICES.get(kind, SERVICE),
        region=paths.name,
        token=token,
        zone=member.zone if member is not None else "",
        stage=member.stage if member is not None else "",
    )
    metrics = (proxy.host, INGRESS_METRICS) if kind is ProxyKind.INGRESS else None
    body: dict[str, Any] = bootstrap(
        who,
        ads_socket=str(paths.ads_socket),
        admin=(proxy.host, ADMIN),
        source_address=proxy.host,
        metrics=metrics,
    )
    return body
