"""Fold: one fact after another into what is known of the mesh.

Law: pure. `fold(facts, event, now)` gives new facts; nothing is sent, nothing is decided about traffic.
A part that was never read is None (or missing), never an empty set: "not known yet" and "none" differ.

A set that empties at once is held until it has stayed empty for CONFIRM_S: most likely the read is at fault
(a wiped catalog, a restored snapshot), and taking all endpoints out of an Envoy can't be undone for the
requests it fails (hashicorp/consul#3975, istio/istio#38440).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, TypeVar

from intentions.model import Intention
from mesh.model import (
    Endpoint,
    Gateway,
    Leaf,
    MeshSnapshot,
    Proxy,
    Roots,
    ServiceSpec,
    TrafficPlan,
)
from regions.model import RegionSet

CONFIRM_S = 5.0
"""Seconds that a set of two or more must stay empty before it is believed."""

K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class EndpointsSeen:
    service: str
    region: str
    endpoints: tuple[Endpoint, ...]


@dataclass(frozen=True, slots=True)
class GatewaysSeen:
    region: str
    gateways: tuple[Gateway, ...]


@dataclass(frozen=True, slots=True)
class ProxiesSeen:
    proxies: tuple[Proxy, ...]


@dataclass(frozen=True, slots=True)
class IntentionsSeen:
    intentions: tuple[Intention, ...]


@dataclass(frozen=True, slots=True)
class RootsSeen:
    roots: Roots


@dataclass(frozen=True, slots=True)
class LeafSeen:
    leaf: Leaf


Event = EndpointsSeen | GatewaysSeen | ProxiesSeen | IntentionsSeen | RootsSeen | LeafSeen


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of the mesh from the seat of one region.

    emptied: when an (service, region) was first seen empty although it had two endpoints or more.
    all_endpoints, all_gateways: the same as the maps, flat and sorted; made anew when the maps change, so
    that builders may tell "unchanged" by identity and a weight change builds nothing but routes.
    """

    region: str
    regions: RegionSet
    services: tuple[ServiceSpec, ...]
    endpoints: Mapping[tuple[str, str], tuple[Endpoint, ...]] = field(
        default_factory=lambda: MappingProxyType({})
    )
    emptied: Mapping[tuple[str, str], float] = field(default_factory=lambda: MappingProxyType({}))
    gateways: Mapping[str, tuple[Gateway, ...]] = field(default_factory=lambda: MappingProxyType({}))
    all_endpoints: tuple[Endpoint, ...] = ()
    all_gateways: tuple[Gateway, ...] = ()
    proxies: Mapping[str, Proxy] | None = None
    intentions: tuple[Intention, ...] | None = None
    roots: Roots | None = None
    leafs: Mapping[str, Leaf] = field(default_factory=lambda: MappingProxyType({}))


def fold(facts: Facts, event: Event, now: float) -> Facts:
    """The facts after `event`. now: monotonic seconds."""
    match event:
        case EndpointsSeen():
            return _endpoints(facts, event, now)
        case GatewaysSeen(region, gateways):
            known = _with(facts.gateways, region, gateways)
            return replace(facts, gateways=known, all_gateways=_flat(known))
        case ProxiesSeen(proxies):
            return replace(facts, proxies=MappingProxyType({p.id: p for p in proxies}))
        case IntentionsSeen(intentions):
            return replace(facts, intentions=tuple(sorted(intentions)))
        case RootsSeen(roots):
            return replace(facts, roots=roots)
        case LeafSeen(leaf):
            return replace(facts, leafs=_with(facts.leafs, leaf.service, leaf))


def _endpoints(facts: Facts, event: EndpointsSeen, now: float) -> Facts:
    key = (event.service, event.region)
    before = facts.endpoints.get(key, ())
    since = facts.emptied.get(key)
    if not event.endpoints and len(before) > 1:
        first = now if since is None else since
        if now - first < CONFIRM_S:
            return replace(facts, emptied=_with(facts.emptied, key, first))
    known = _with(facts.endpoints, key, tuple(sorted(event.endpoints)))
    emptied = _without(facts.emptied, key)
    return replace(facts, endpoints=known, all_endpoints=_flat(known), emptied=emptied)


def overdue(facts: Facts, now: float) -> tuple[EndpointsSeen, ...]:
    """Emptied sets whose time is up: fold these events and they are believed."""
    return tuple(
        EndpointsSeen(s, r, ()) for (s, r), since in facts.emptied.items() if now - since >= CONFIRM_S
    )


def missing(facts: Facts) -> tuple[str, ...]:
    """What the first snapshot still waits for, in words. Other regions may be dead: not waited for."""
    wants = {
        "the proxies of this region": facts.proxies is not None,
        "the CA roots": facts.roots is not None,
        "the intentions": facts.intentions is not None,
    }
    for spec in facts.services:
        wants[f"the endpoints of {spec.name} in {facts.region}"] = (
            spec.name,
            facts.region,
        ) in facts.endpoints
    for service in sorted(needed_leafs(facts)):
        wants[f"the leaf of {service}"] = service in facts.leafs
    return tuple(what for what, there in wants.items() if not there)


def needed_leafs(facts: Facts) -> frozenset[str]:
    """Services whose leaf some proxy of this region presents: to its peers, or in its health checks."""
    return frozenset(p.service for p in (facts.proxies or {}).values())


def healthy(facts: Facts, service: str) -> dict[tuple[str, str], int]:
    """Instances that may take new requests, by (region, stage)."""
    out: dict[tuple[str, str], int] = {}
    for (name, region), endpoints in facts.endpoints.items():
        for end in endpoints:
            if name == service:
                out[(region, end.stage)] = out.get((region, end.stage), 0) + int(
                    end.health in ("passing", "warning")
                )
    return out


def snapshot(facts: Facts, plans: Mapping[str, TrafficPlan]) -> MeshSnapshot:
    """Everything the builders need. Raises SnapshotError when it contradicts itself."""
    result = MeshSnapshot(
        region=facts.region,
        regions=facts.regions,
        services=facts.services,
        endpoints=facts.all_endpoints,
        gateways=facts.all_gateways,
        proxies=facts.proxies or MappingProxyType({}),
        intentions=facts.intentions or (),
        roots=facts.roots,
        leafs=facts.leafs,
        plans=MappingProxyType(dict(plans)),
    )
    result.check()
    return result


def _flat(groups: Mapping[Any, tuple[V, ...]]) -> tuple[V, ...]:
    return tuple(sorted(item for group in groups.values() for item in group))  # type: ignore[type-var]


def _with(mapping: Mapping[K, V], key: K, value: V) -> Mapping[K, V]:
    return MappingProxyType({**mapping, key: value})


def _without(mapping: Mapping[K, V], key: K) -> Mapping[K, V]:
    return MappingProxyType({k: v for k, v in mapping.items() if k != key})
