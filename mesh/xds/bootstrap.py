"""The file an Envoy of ours is started with: how to reach the control plane, and no word of what it says.

Law: pure: values in, JSON data out (for `envoy -c`). The token in it is a secret: write the file 0600.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mesh.model import ProxyKind
from mesh.xds import names
from mesh.xds.clusters import socket_address
from mesh.xds.pb import Json, seconds, typed

Address = tuple[str, int]


@dataclass(frozen=True, slots=True)
class ProxyIdentity:
    """Who the Envoy says it is. id: Consul service id of its registration. token: secret for ADS."""

    id: str
    kind: ProxyKind
    service: str
    region: str
    token: str = field(repr=False)
    zone: str = ""
    stage: str = ""


def bootstrap(
    who: ProxyIdentity,
    *,
    ads_socket: str,
    admin: Address,
    source_address: str,
    metrics: Address | None = None,
    max_heap_mib: int = 512,
) -> Json:
    """Bootstrap JSON.

    ads_socket: path of the control plane's Unix socket (under 100 bytes).
    admin: loopback host and port of the admin page. metrics: where `/metrics` alone is served, if anywhere.
    source_address: IP that outgoing connections are bound to (empty: the system chooses).
    """
    listeners = [_metrics_listener(metrics)] if metrics else []
    clusters = [_ads_cluster(ads_socket), *([_admin_cluster(admin)] if metrics else [])]
    return {
        "node": _node(who),
        "admin": {"address": socket_address(*admin)},
        "dynamic_resources": {
            "ads_config": _grpc_source(who.token),
            "cds_config": _ADS,
            "lds_config": _ADS,
        },
        "static_resources": {"clusters": clusters, "listeners": listeners},
        "cluster_manager": _cluster_manager(who.token, source_address),
        "stats_config": {"stats_tags": stats_tags()},
        "layered_runtime": {
            "layers": [{"name": "weir", "static_layer": RUNTIME}, {"name": "admin", "admin_layer": {}}]
        },
        "overload_manager": _overload(max_heap_mib),
    }


RUNTIME: Json = {
    # Rebuilding balancers once per batch left new hosts without traffic (envoy#45212, #45344): be sure.
    "envoy.reloadable_features.coalesce_lb_rebuilds_on_batch_update": False,
}

_ADS: Json = {"ads": {}, "initial_fetch_timeout": seconds(15), "resource_api_version": "V3"}


def stats_tags() -> list[Json]:
    """service, region and stage as labels of cluster statistics (`chat~cn-north-1~canary`).

    The first group of each expression is what Envoy takes out of the name; all lie inside cluster_name.
    """
    head, part = r"^cluster\.(?:gateway~)?", "[^~.]+"
    return [
        {"tag_name": "service", "regex": rf"{head}(({part})~){part}~{part}\."},
        {"tag_name": "region", "regex": rf"{head}{part}~(({part})~){part}\."},
        {"tag_name": "stage", "regex": rf"{head}{part}~{part}~(({part}))\."},
    ]


def _node(who: ProxyIdentity) -> Json:
    return {
        "id": who.id,
        "cluster": who.service,
        "locality": {"region": who.region, "zone": who.zone, "sub_zone": who.stage},
        "metadata": {"weir_kind": who.kind.value},
    }


def _grpc_source(token: str) -> Json:
    return {
        "api_type": "DELTA_GRPC",
        "transport_api_version": "V3",
        "set_node_on_first_message_only": True,
        "grpc_services": [_grpc(token)],
    }


def _grpc(token: str) -> Json:
    # Envoy's own back-off grows to 30 s: after a short absence of the control plane the next weight change
    # would wait for it (measured: 9.2 s; with this 0.9 s). It is jittered, and the server admits in turn.
    back_off = {"base_interval": "0.1s", "max_interval": "1s"}
    return {
        "envoy_grpc": {"cluster_name": names.ADS_CLUSTER, "retry_policy": {"retry_back_off": back_off}},
        "initial_metadata": [{"key": names.TOKEN_METADATA, "value": token}],
    }


def _cluster_manager(token: str, source_address: str) -> Json:
    load_reports = {"api_type": "GRPC", "transport_api_version": "V3", "grpc_services": [_grpc(token)]}
    manager: Json = {"load_stats_config": load_reports}
    if source_address:
        manager["upstream_bind_config"] = {"source_address": {"address": source_address, "port_value": 0}}
    return manager


_HTTP_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"


def _ads_cluster(ads_socket: str) -> Json:
    keepalive = {"interval": seconds(30), "timeout": seconds(5)}
    options = typed(
        _HTTP_OPTIONS,
        {"explicit_http_config": {"http2_protocol_options": {"connection_keepalive": keepalive}}},
    )
    return {
        "name": names.ADS_CLUSTER,
        "type": "STATIC",
        "connect_timeout": seconds(1),
        "load_assignment": _one(names.ADS_CLUSTER, {"pipe": {"path": ads_socket}}),
        "typed_extension_protocol_options": {_HTTP_OPTIONS: options},
    }


def _admin_cluster(admin: Address) -> Json:
    return {
        "name": "admin",
        "type": "STATIC",
        "connect_timeout": seconds(1),
        "load_assignment": _one("admin", socket_address(*admin)),
    }


def _one(cluster: str, address: Json) -> Json:
    return {"cluster_name": cluster, "endpoints": [{"lb_endpoints": [{"endpoint": {"address": address}}]}]}


def _metrics_listener(where: Address) -> Json:
    """`/metrics` and nothing else: the rest of the admin page can stop the proxy."""
    routes: list[Json] = [
        {"match": {"path": "/metrics"}, "route": {"cluster": "admin", "prefix_rewrite": "/stats/prometheus"}},
        {"match": {"prefix": "/"}, "direct_response": {"status": 404}},
    ]
    manager = {
        "stat_prefix": "metrics",
        "route_config": {
            "name": "metrics",
            "virtual_hosts": [{"name": "metrics", "domains": ["*"], "routes": routes}],
        },
        "http_filters": [
            {
                "name": "envoy.filters.http.router",
                "typed_config": typed("envoy.extensions.filters.http.router.v3.Router"),
            }
        ],
    }
    name = "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
    hcm = {"name": "envoy.filters.network.http_connection_manager", "typed_config": typed(name, manager)}
    return {"name": "metrics", "address": socket_address(*where), "filter_chains": [{"filters": [hcm]}]}


def _overload(max_heap_mib: int) -> Json:
    """Give memory back at 90 %, refuse new work at 97 %: a proxy that says 503 beats one that is killed."""
    heap, limit = (
        "envoy.resource_monitors.fixed_heap",
        "envoy.resource_monitors.global_downstream_max_connections",
    )
    monitors = {
        heap: ("fixed_heap.v3.FixedHeapConfig", {"max_heap_size_bytes": max_heap_mib * 1024 * 1024}),
        limit: (
            "downstream_connections.v3.DownstreamConnectionsConfig",
            {"max_active_downstream_connections": 20_000},
        ),
    }
    actions = {
        "envoy.overload_actions.shrink_heap": 0.90,
        "envoy.overload_actions.stop_accepting_requests": 0.97,
    }
    return {
        "refresh_interval": seconds(0.25),
        "resource_monitors": [
            {"name": name, "typed_config": typed("envoy.extensions.resource_monitors." + kind, config)}
            for name, (kind, config) in monitors.items()
        ],
        "actions": [
            {"name": name, "triggers": [{"name": heap, "threshold": {"value": at}}]}
            for name, at in actions.items()
        ],
    }
