"""EDS: who answers for one (service, region, stage), in priorities.

Law: pure; messages are built directly, for this is where thousands of things are. Priority numbers belong to
hops, so an empty hop stays as an empty priority: numbers never shift under live traffic.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from itertools import groupby

from envoy.config.core.v3 import address_pb2, base_pb2, health_check_pb2
from envoy.config.endpoint.v3 import endpoint_components_pb2, endpoint_pb2

from mesh.model import Endpoint, Gateway, Health
from mesh.xds import names
from mesh.xds.failover import Hop
from mesh.xds.resource_set import Resource, make
from regions.model import RegionSet

OVERPROVISIONING = 140
"""A group keeps all its traffic while 72 % of it is healthy (1 / 1.4): what is left takes up to 1.4 times its
share; beyond that the next priority takes part. Envoy's default, written down because drills rely on it."""

HEALTH: Mapping[Health, int] = {
    Health.PASSING: health_check_pb2.HEALTHY,
    # Not DEGRADED: that would send a session to another region for what Consul calls a warning.
    Health.WARNING: health_check_pb2.HEALTHY,
    Health.CRITICAL: health_check_pb2.UNHEALTHY,
    Health.DRAINING: health_check_pb2.DRAINING,
    # Known and sent nothing new: awake again it takes traffic at once, without a first health check.
    Health.ASLEEP: health_check_pb2.DRAINING,
}

SERVING = frozenset({Health.PASSING, Health.WARNING})

Key = tuple[str, str, str]
"""(service, region, stage)"""


def index(endpoints: Iterable[Endpoint]) -> dict[Key, tuple[Endpoint, ...]]:
    """Endpoints by (service, region, stage), each group in zone and instance order."""
    groups: dict[Key, list[Endpoint]] = {}
    for end in endpoints:
        groups.setdefault((end.service, end.region, end.stage), []).append(end)
    return {key: tuple(sorted(group, key=_order)) for key, group in groups.items()}


def gateways_of(gateways: Iterable[Gateway], regions: RegionSet, region: str) -> tuple[Gateway, ...]:
    """Mesh gateways of a region: those in the catalog, else the address its row gives (an IP literal)."""
    found = tuple(sorted(g for g in gateways if g.region == region))
    row = regions.get(region)
    if found or row is None or not row.gateways.mesh:
        return found
    host, _, port = row.gateways.mesh.rpartition(":")
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return ()  # EDS knows addresses only; a host name here needs the catalog
    return (Gateway(region=region, instance=f"{region}-row", address=host.strip("[]"), port=int(port)),)


def ingress_assignment(
    service: str,
    priorities: tuple[Hop, ...],
    groups: Mapping[Key, tuple[Endpoint, ...]],
    gateways: Mapping[str, tuple[Gateway, ...]],
) -> Resource:
    """The ClusterLoadAssignment of the cluster whose first hop is `priorities[0]`."""
    name = names.cluster(service, priorities[0].region, priorities[0].stage)
    assignment = _assignment(name)
    taken: set[tuple[str, int]] = set()
    for priority, hop in enumerate(priorities):
        if hop.direct:
            _add_direct(assignment, priority, groups.get((service, hop.region, hop.stage), ()), hop)
        else:
            # Envoy knows a host by its address: a second entry of one gateway would be dropped, silently.
            free = tuple(g for g in gateways.get(hop.region, ()) if (g.address, g.port) not in taken)
            serving = any(e.health in SERVING for e in groups.get((service, hop.region, hop.stage), ()))
            taken |= {(g.address, g.port) for g in free} if serving else set()
            _add_gateways(assignment, priority, free if serving else (), hop, service)
    return make(name, assignment)


def gateway_assignment(name: str, group: tuple[Endpoint, ...]) -> Resource:
    """Mesh gateway: the instances of one local (service, stage), and no stand-in.

    A gateway passes connections, and one that fell back to stable would stay there for its whole life, long
    after the canary is back (measured). Falling back is the ingress' business.
    """
    assignment = _assignment(name)
    _add_direct(assignment, 0, group, None)
    return make(name, assignment)


def _assignment(name: str) -> endpoint_pb2.ClusterLoadAssignment:
    assignment = endpoint_pb2.ClusterLoadAssignment(cluster_name=name)
    assignment.policy.overprovisioning_factor.value = OVERPROVISIONING
    return assignment


def _add_direct(
    assignment: endpoint_pb2.ClusterLoadAssignment,
    priority: int,
    group: tuple[Endpoint, ...],
    hop: Hop | None,
) -> None:
    shown = _askable(group)
    for zone, members in groupby(shown, key=lambda e: e.zone):
        ends = list(members)
        locality = base_pb2.Locality(region=ends[0].region, zone=zone, sub_zone=ends[0].stage)
        assignment.endpoints.append(
            endpoint_components_pb2.LocalityLbEndpoints(
                locality=locality, priority=priority, lb_endpoints=[_instance(e, hop) for e in ends]
            )
        )
    if not shown:
        assignment.endpoints.append(endpoint_components_pb2.LocalityLbEndpoints(priority=priority))


def _askable(group: tuple[Endpoint, ...]) -> tuple[Endpoint, ...]:
    """Without its sleepers, where nobody else serves: an Envoy in panic would ask them (measured)."""
    if any(e.health in SERVING for e in group):
        return group
    return tuple(e for e in group if e.health is not Health.ASLEEP)


def _instance(end: Endpoint, hop: Hop | None) -> endpoint_components_pb2.LbEndpoint:
    result = _lb_endpoint(end.address, end.port, end.health)
    result.load_balancing_weight.value = max(1, end.weight)
    tags = {
        "service": end.service,
        "region": end.region,
        "stage": end.stage,
        "zone": end.zone,
        "instance": end.instance,
    }
    _tag(result, tags, hop)
    return result


def _add_gateways(
    assignment: endpoint_pb2.ClusterLoadAssignment,
    priority: int,
    gateways: tuple[Gateway, ...],
    hop: Hop,
    service: str,
) -> None:
    group = endpoint_components_pb2.LocalityLbEndpoints(priority=priority)
    if gateways:
        group.locality.CopyFrom(base_pb2.Locality(region=hop.region, sub_zone=hop.stage))
    for gateway in gateways:
        end = _lb_endpoint(gateway.address, gateway.port, gateway.health)
        # When a region's canary goes or comes, its gateway moves to another priority with another SNI. Envoy
        # would move the host with its connections, and they would go on under the old SNI (measured); another
        # host name makes it a new host (Envoy >= 1.39).
        end.endpoint.hostname = hop.label
        tags = {
            "service": service,
            "region": hop.region,
            "stage": hop.stage,
            "zone": "",
            "instance": gateway.instance,
        }
        _tag(end, tags, hop)
        group.lb_endpoints.append(end)
    assignment.endpoints.append(group)


def _lb_endpoint(address: str, port: int, health: Health) -> endpoint_components_pb2.LbEndpoint:
    where = address_pb2.Address(socket_address=address_pb2.SocketAddress(address=address, port_value=port))
    return endpoint_components_pb2.LbEndpoint(
        endpoint=endpoint_components_pb2.Endpoint(address=where), health_status=HEALTH[health]
    )


def _tag(end: endpoint_components_pb2.LbEndpoint, tags: Mapping[str, str], hop: Hop | None) -> None:
    metadata = end.metadata.filter_metadata
    for key in sorted(tags):
        metadata[names.METADATA_NAMESPACE].fields[key].string_value = tags[key]
    if hop is not None:
        metadata["envoy.transport_socket_match"].fields["hop"].string_value = hop.label


def _order(end: Endpoint) -> tuple[str, str, str, int]:
    return (end.zone, end.instance, end.address, end.port)
