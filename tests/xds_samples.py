"""Snapshots that tests of the builders start from: three regions, one service, stable and canary.

Law: pure. Addresses are 127.103.<region index>.<x>; certificates come from a throw-away CA, so goldens leave
secrets out.
"""

from __future__ import annotations

from dataclasses import replace

from intentions.model import Action, Intention
from mesh.model import (
    CANARY,
    STABLE,
    Endpoint,
    Gateway,
    Health,
    Leaf,
    MeshSnapshot,
    Proxy,
    ProxyKind,
    Roots,
    ServiceSpec,
    Slice,
    TrafficPlan,
)
from regions.model import Cloud, Region, RegionSet

TRUST_DOMAIN = "11111111-2222-3333-4444-555555555555.consul"
CN, US, EU = "cn-north-1", "us-east-1", "westeurope"
INDEX = {CN: 1, US: 2, EU: 3}
SPEC = ServiceSpec("chat", "/chat", first_byte_timeout_s=2.0)


def regions(network: str = "") -> RegionSet:
    """Three regions that fail over to the next; in one flat network when `network` is given."""
    order = {CN: (US, EU), US: (CN, EU), EU: (US, CN)}
    return RegionSet(
        tuple(
            Region(name, Cloud.LOCAL, ("a", "b"), order[name], 1.0, primary=name == CN, network=network)
            for name in order
        )
    )


def endpoint(region: str, stage: str, number: int, health: Health = Health.PASSING) -> Endpoint:
    host = 10 + number + (5 if stage == CANARY else 0)
    return Endpoint(
        "chat", region, stage, f"chat-{stage}-{number}", f"127.103.{INDEX[region]}.{host}", 21000,
        zone="ab"[number % 2], health=health,
    )  # fmt: skip


def endpoints() -> tuple[Endpoint, ...]:
    """Two stable and one canary in each region."""
    layout = ((STABLE, 0), (STABLE, 1), (CANARY, 0))
    return tuple(endpoint(region, stage, n) for region in INDEX for stage, n in layout)


def gateways() -> tuple[Gateway, ...]:
    return tuple(Gateway(r, f"{r}-mesh-gateway", f"127.103.{i}.4", 8443) for r, i in INDEX.items())


def plan(*slices: tuple[str, str, int]) -> TrafficPlan:
    return TrafficPlan("chat", tuple(Slice(*s) for s in slices), 0.0, "", {})


def canary_15() -> TrafficPlan:
    """Thirds by region, 15 % of each for the canary, laid out region first."""
    thirds = ((CN, 3334), (US, 3333), (EU, 3333))
    return plan(
        *(piece for r, w in thirds for piece in ((r, CANARY, w * 15 // 100), (r, STABLE, w - w * 15 // 100)))
    )


ALLOW_INGRESS = (Intention("chat", "ingress-gateway", Action.ALLOW),)


def snapshot(region: str = CN) -> MeshSnapshot:
    return MeshSnapshot(
        region, regions(), (SPEC,), endpoints(), gateways(), intentions=ALLOW_INGRESS,
        roots=Roots(TRUST_DOMAIN, ("-----root-----\n",), "one"), plans={"chat": canary_15()},
    )  # fmt: skip


def with_leafs(snap: MeshSnapshot, *leafs: Leaf) -> MeshSnapshot:
    return replace(snap, leafs={leaf.service: leaf for leaf in leafs})


def ingress(meta: dict[str, str] | None = None) -> Proxy:
    meta = meta if meta is not None else {"tls_sds_path": "/run/weir/ingress-tls.json", "http_port": "8080"}
    return Proxy(
        "cn-north-1-ingress", ProxyKind.INGRESS, "ingress-gateway", "127.103.1.3", 8443, "", meta=meta
    )


def sidecar() -> Proxy:
    return Proxy(
        "chat-canary-0-sidecar-proxy", ProxyKind.SIDECAR, "chat", "127.103.1.15", 21000, "",
        "127.103.1.15", 9000, CANARY, "a",
    )  # fmt: skip


def mesh_gateway() -> Proxy:
    return Proxy("cn-north-1-mesh-gateway", ProxyKind.MESH_GATEWAY, "mesh-gateway", "127.103.1.4", 8443, "")
