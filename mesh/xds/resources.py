"""The resources of one proxy from the snapshot: a switch over its kind.

Law: pure: the same snapshot and proxy give the same bytes. What is remembered between calls is remembered by
input, so forgetting it changes only the time a call takes. Parts that did not change are the same objects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from mesh.model import Endpoint, MeshSnapshot, Proxy, ProxyKind, ServiceSpec, SnapshotError
from mesh.xds import clusters, endpoints, inbound, listeners, names, routes, secrets
from mesh.xds.endpoints import SERVING, Key
from mesh.xds.failover import hops
from mesh.xds.resource_set import Resource, ResourceSet, gather

LOCAL_APP_IDLE_S = 30.0

Parts = tuple[Resource, ...]


class NotReady(SnapshotError):
    """Something this proxy cannot live without (roots, its leaf, its service) is not known yet."""


def build(snapshot: MeshSnapshot, proxy: Proxy) -> ResourceSet:
    """Everything `proxy` is to have. Raises NotReady, SnapshotError, DanglingReference: keep the old set."""
    return _checked(_BUILDERS[proxy.kind](snapshot, proxy))


@lru_cache(maxsize=64)
def _checked(parts: tuple[Resource, ...]) -> ResourceSet:
    """Proxies that are to have the same things have the same set, put together and checked once."""
    result = gather(parts)
    result.check()
    return result


class _Same:
    """Compares by identity. Snapshots share what did not change, so "the same object" is the cheap key:
    hashing ten thousand endpoints on every weight change is what we avoid."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value


@lru_cache(maxsize=4)
def _index(ends: _Same) -> Mapping[Key, tuple[Endpoint, ...]]:
    return MappingProxyType(endpoints.index(ends.value))


@lru_cache(maxsize=4)
def _live(ends: _Same) -> Mapping[tuple[str, str], frozenset[str]]:
    """Regions with a serving instance, by (service, stage)."""
    found: dict[tuple[str, str], set[str]] = {}
    for (service, region, stage), group in _index(ends).items():
        if any(e.health in SERVING for e in group):
            found.setdefault((service, stage), set()).add(region)
    return {key: frozenset(regions) for key, regions in found.items()}


def _ingress(snapshot: MeshSnapshot, proxy: Proxy) -> Parts:
    domain = _trust_domain(snapshot, proxy)
    shared = _ingress_shared(
        _Same(snapshot.endpoints), _Same(snapshot.gateways), _Same(snapshot.regions), snapshot.region,
        (snapshot.services, domain),
    )  # fmt: skip
    doors = _doors(snapshot, proxy)
    return (*shared, *doors, _routes(snapshot), *_secrets(snapshot, proxy))


@lru_cache(maxsize=8)
def _ingress_shared(
    ends: _Same, gateways: _Same, regions: _Same, here: str, rest: tuple[tuple[ServiceSpec, ...], str]
) -> tuple[Resource, ...]:
    """Clusters and endpoints of every (service, region, stage), instances or not: so that a first canary
    needs no new cluster, and its cluster is warm before weight arrives."""
    services, domain = rest
    doors = {r: endpoints.gateways_of(gateways.value, regions.value, r) for r in regions.value.names}
    result: list[Resource] = []
    for spec in services:
        for region in regions.value.names:
            for stage in routes.STAGES:
                order = hops(regions.value, here, region, stage)
                result.append(clusters.ingress_cluster(spec, order, domain))
                result.append(endpoints.ingress_assignment(spec.name, order, _index(ends), doors))
    return tuple(result)


def _doors(snapshot: MeshSnapshot, proxy: Proxy) -> list[Resource]:
    specs = tuple(sorted(snapshot.services, key=lambda s: s.name))
    sds_path, http_port = proxy.meta.get(names.META_TLS_SDS, ""), proxy.meta.get(names.META_HTTP_PORT, "")
    doors = []
    if sds_path:
        doors.append(listeners.ingress(proxy.address, proxy.port, specs, sds_path))
    if http_port:
        if not http_port.isdigit():
            raise SnapshotError(f"proxy {proxy.id}: meta {names.META_HTTP_PORT} is {http_port!r}, not a port")
        doors.append(listeners.ingress(proxy.address, int(http_port), specs, ""))
    if not doors:
        raise SnapshotError(
            f"proxy {proxy.id}: meta has neither {names.META_TLS_SDS} nor {names.META_HTTP_PORT}, so no door"
        )
    return doors


def _routes(snapshot: MeshSnapshot) -> Resource:
    live = _live(_Same(snapshot.endpoints))
    rows = []
    for spec in sorted(snapshot.services, key=lambda s: s.name):
        plan = snapshot.plans.get(spec.name)
        slices = plan.slices if plan else ()
        dyes = tuple(
            (stage, routes.dyed(slices, stage, live.get((spec.name, stage), frozenset())))
            for stage in routes.STAGES
        )
        rows.append((spec, slices, dyes))
    return routes.route_config(tuple(rows))


def _sidecar(snapshot: MeshSnapshot, proxy: Proxy) -> Parts:
    domain = _trust_domain(snapshot, proxy)
    spec = snapshot.service(proxy.service)
    if spec is None:
        raise NotReady(f"proxy {proxy.id}: service {proxy.service!r} is not in the catalog of services")
    colour = inbound.value_of(snapshot.region, proxy)
    leaving = any(
        (e.address, e.port) == (proxy.address, proxy.port) and e.health not in SERVING
        for e in _group(snapshot, proxy.service, proxy.stage)
    )
    return (
        clusters.local_app(proxy.local_address, proxy.local_port, LOCAL_APP_IDLE_S),
        listeners.sidecar(proxy.address, proxy.port, spec.health_path, domain, leaving=leaving),
        inbound.route_config(spec, colour, snapshot.intentions, domain),
        *_secrets(snapshot, proxy),
    )


def _mesh_gateway(snapshot: MeshSnapshot, proxy: Proxy) -> Parts:
    domain = _trust_domain(snapshot, proxy)
    here = snapshot.region
    subsets = tuple((spec.name, stage) for spec in snapshot.services for stage in routes.STAGES)
    parts: list[Resource] = []
    for spec in snapshot.services:
        for stage in routes.STAGES:
            group = _group(snapshot, spec.name, stage)
            name = clusters.gateway_name(spec.name, here, stage)
            parts.append(clusters.gateway_cluster(spec, here, stage, domain))
            parts.append(endpoints.gateway_assignment(name, group))
    door = listeners.mesh_gateway(proxy.address, proxy.port, here, subsets, domain)
    return (*parts, door, *_secrets(snapshot, proxy))


def _group(snapshot: MeshSnapshot, service: str, stage: str) -> tuple[Endpoint, ...]:
    """Instances of this region."""
    return _index(_Same(snapshot.endpoints)).get((service, snapshot.region, stage), ())


def _trust_domain(snapshot: MeshSnapshot, proxy: Proxy) -> str:
    if snapshot.roots is None:
        raise NotReady(f"proxy {proxy.id}: the Connect CA roots are not known yet")
    return snapshot.roots.trust_domain


def _secrets(snapshot: MeshSnapshot, proxy: Proxy) -> tuple[Resource, ...]:
    """Its own leaf and the roots; no other service's leaf, whatever the proxy asks for."""
    leaf = snapshot.leafs.get(proxy.service)
    if leaf is None or snapshot.roots is None:
        raise NotReady(f"proxy {proxy.id}: the leaf certificate of {proxy.service!r} is not known yet")
    return secrets.leaf(leaf), secrets.roots(snapshot.roots)


_BUILDERS: Mapping[ProxyKind, Callable[[MeshSnapshot, Proxy], Parts]] = MappingProxyType(
    {ProxyKind.INGRESS: _ingress, ProxyKind.SIDECAR: _sidecar, ProxyKind.MESH_GATEWAY: _mesh_gateway}
)
