"""Small real resource sets for tests of the xDS protocol: real messages, tiny content.

Law: pure. Content is chosen by the caller; nothing here is taken from the builders under test.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from envoy.config.cluster.v3 import cluster_pb2
from envoy.config.core.v3 import config_source_pb2
from envoy.config.endpoint.v3 import endpoint_pb2
from envoy.config.listener.v3 import listener_pb2
from envoy.config.route.v3 import route_pb2
from envoy.extensions.filters.http.router.v3 import router_pb2
from envoy.extensions.filters.network.http_connection_manager.v3 import http_connection_manager_pb2 as hcm_pb2
from envoy.extensions.transport_sockets.tls.v3 import secret_pb2

from mesh.xds.resource_set import Resource, ResourceSet, gather, make, pack


def ads() -> config_source_pb2.ConfigSource:
    """ConfigSource "over this stream"."""
    return config_source_pb2.ConfigSource(
        ads=config_source_pb2.AggregatedConfigSource(), resource_api_version=config_source_pb2.V3
    )


def cluster(name: str, revision: int = 1) -> Resource:
    """An EDS cluster; each revision differs in its connect timeout (`revision` ms above a second)."""
    message = cluster_pb2.Cluster(name=name, type=cluster_pb2.Cluster.EDS)
    message.connect_timeout.FromMilliseconds(1_000 + revision)
    message.eds_cluster_config.eds_config.CopyFrom(ads())
    return make(name, message)


def endpoints(name: str, port: int = 9000, address: str = "127.104.1.10") -> Resource:
    """One endpoint."""
    message = endpoint_pb2.ClusterLoadAssignment(cluster_name=name)
    socket = message.endpoints.add().lb_endpoints.add().endpoint.address.socket_address
    socket.address, socket.port_value = address, port
    return make(name, message)


def routes(weights: Mapping[str, int], name: str = "ingress") -> Resource:
    """One route table over weighted clusters."""
    message = route_pb2.RouteConfiguration(name=name)
    host = message.virtual_hosts.add(name="all", domains=["*"])
    route = host.routes.add()
    route.match.prefix = "/"
    for target, weight in sorted(weights.items()):
        route.route.weighted_clusters.clusters.add(name=target).weight.value = weight
    return make(name, message)


def listener(
    name: str = "ingress", port: int = 8080, route: str = "ingress", address: str = "127.104.1.3"
) -> Resource:
    """An HTTP listener whose routes come by RDS."""
    manager = hcm_pb2.HttpConnectionManager(stat_prefix=name)
    manager.rds.route_config_name = route
    manager.rds.config_source.CopyFrom(ads())
    manager.http_filters.add(name="envoy.filters.http.router").typed_config.CopyFrom(
        pack(router_pb2.Router())
    )
    message = listener_pb2.Listener(name=name)
    message.address.socket_address.address = address
    message.address.socket_address.port_value = port
    network = message.filter_chains.add().filters.add(name="envoy.filters.network.http_connection_manager")
    network.typed_config.CopyFrom(pack(manager))
    return make(name, message)


def secret(name: str, text: str) -> Resource:
    """A secret with `text` for a certificate."""
    message = secret_pb2.Secret(name=name)
    message.validation_context.trusted_ca.inline_string = text
    return make(name, message)


def simple(weights: Mapping[str, int], extra: Iterable[Resource] = (), **revisions: int) -> ResourceSet:
    """Clusters with endpoints, a route table with these weights, a listener. `revisions`: cluster →
    revision."""
    parts: list[Resource] = [listener(), routes(weights), *extra]
    for name in weights:
        parts += [cluster(name, revisions.get(name, 1)), endpoints(name)]
    made = gather(parts)
    made.check()
    return made
