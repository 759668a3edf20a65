"""CDS: the clusters of the three kinds of proxy.

Law: pure. A cluster depends on the service's spec and on the topology, never on health or weights: those
change all the time, and every changed cluster is warmed anew and drops its connection pools.
"""

from __future__ import annotations

from functools import lru_cache

from envoy.config.cluster.v3 import cluster_pb2

from mesh.model import CircuitSpec, RetrySpec, ServiceSpec
from mesh.xds import names, tls
from mesh.xds.failover import Hop
from mesh.xds.pb import Json, proto, seconds, typed
from mesh.xds.resource_set import Resource, make

LOCAL_APP = "local_app"
"""Cluster of the application behind a sidecar."""

CONNECT_TIMEOUT_S = 0.75
"""Covers TCP and TLS: a frozen peer accepts TCP in its kernel and then says nothing."""

MAGLEV_TABLE = 16_381
"""Prime. Groups have tens of instances, not thousands; a table of the default 65,537 entries per priority
would cost the main thread (which also takes xDS) four times as much on every health change."""

BALANCE_FACTOR = 150
"""Bounded load: an instance gets at most 1.5 x its fair share of the active requests, then the next one of
the hash order takes over. Sessions stay in place until a hot one would drown its instance."""

STREAMS_PER_CONNECTION = 16
"""Mesh gateways pass connections, not requests: with few streams on each, many connections spread the load
over the instances behind the gateway, and one reset hits few streams."""

PANIC_PERCENT = 1
"""Envoy panics (takes unhealthy hosts too) only when ALL priorities together cannot carry the load. At 1 % no
group panics while any stand-in lives: a dead group goes to the next priority as a whole. When every priority
is dead to us, requests are spread over all hosts instead of being refused: the last resort is to try, for a
broken health path must not take down instances that work. 0 would answer 503 in that case."""

_HTTP_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"


def stat_name(service: str, region: str, stage: str) -> str:
    """Name in statistics. No dots, so that Envoy's own cluster_name tag takes it whole."""
    return f"{service}~{region}~{stage}"


@lru_cache(maxsize=4096)
def ingress_cluster(spec: ServiceSpec, priorities: tuple[Hop, ...], trust_domain: str) -> Resource:
    """The cluster of one (service, region, stage); `priorities[0]` is that region and stage."""
    first = priorities[0]
    name = names.cluster(spec.name, first.region, first.stage)
    return make(
        name,
        proto(
            cluster_pb2.Cluster,
            {
                **_eds(name),
                "alt_stat_name": stat_name(spec.name, first.region, first.stage),
                "load_balancing_policy": {"policies": [{"typed_extension_config": _maglev()}]},
                "transport_socket_matches": [
                    {
                        "name": hop.label,
                        "match": {"hop": hop.label},
                        "transport_socket": _socket(spec, hop, trust_domain),
                    }
                    for hop in priorities
                ],
                # An endpoint that matches none must not be spoken to in the clear.
                "transport_socket": _socket(spec, first, trust_domain),
                "typed_extension_protocol_options": {_HTTP_OPTIONS: _http2()},
                "circuit_breakers": circuit_breakers(spec.circuit, spec.retry),
                "outlier_detection": outlier_detection(),
                "health_checks": [health_check(spec)],
                # For HTTP this drains: new requests get new connections (behind a gateway: to another
                # instance), streams that flow go on (measured). The HTTP/2 ping cuts frozen peers.
                "close_connections_on_host_health_failure": True,
                **_LEAVING,
            },
        ),
    )


@lru_cache(maxsize=1024)
def gateway_cluster(spec: ServiceSpec, region: str, stage: str, trust_domain: str) -> Resource:
    """Mesh gateway: the sidecars of one local (service, stage), as TCP.

    The bytes pass through untouched; only the health check speaks TLS, under the gateway's own identity, and
    so sees a frozen sidecar or application that a TCP connect would not.
    """
    name = gateway_name(spec.name, region, stage)
    socket = tls.upstream(
        names.spiffe(spec.name, region, trust_domain), names.sni(spec.name, stage, region, trust_domain)
    )
    check = {**health_check(spec), "transport_socket_match_criteria": {"hop": "health"}}
    return make(
        name,
        proto(
            cluster_pb2.Cluster,
            {
                **_eds(name),
                # Round robin: by least request a frozen instance, having few connections, would always win.
                "load_balancing_policy": {"policies": [{"typed_extension_config": _round_robin()}]},
                "transport_socket_matches": [
                    {"name": "health", "match": {"hop": "health"}, "transport_socket": socket}
                ],
                "circuit_breakers": _wide_open(),
                "outlier_detection": outlier_detection(),
                "health_checks": [check],
                # Not here: for TCP it closes, and would cut streams of an instance slow to answer checks.
                "close_connections_on_host_health_failure": False,
                **_LEAVING,
            },
        ),
    )


@lru_cache(maxsize=1024)
def local_app(address: str, port: int, idle_s: float) -> Resource:
    """Sidecar: the application beside it, HTTP/1.1 with kept connections.

    idle_s is shorter than what HTTP servers keep (aiohttp: 75 s), so that we close first and no request
    meets a closing connection.
    """
    return make(
        LOCAL_APP,
        proto(
            cluster_pb2.Cluster,
            {
                "name": LOCAL_APP,
                "type": "STATIC",
                "connect_timeout": seconds(CONNECT_TIMEOUT_S),
                "load_assignment": {
                    "cluster_name": LOCAL_APP,
                    "endpoints": [
                        {"lb_endpoints": [{"endpoint": {"address": socket_address(address, port)}}]}
                    ],
                },
                "typed_extension_protocol_options": {
                    _HTTP_OPTIONS: typed(
                        _HTTP_OPTIONS,
                        {
                            "common_http_protocol_options": {"idle_timeout": seconds(idle_s)},
                            "explicit_http_config": {"http_protocol_options": {}},
                        },
                    )
                },
                "circuit_breakers": _wide_open(),
            },
        ),
    )


def gateway_name(service: str, region: str, stage: str) -> str:
    """Mesh gateway cluster, its EDS name, and its name in statistics.

    Unlike names.cluster it has no dots: load reports of gateways must not count the same request again.
    """
    return "gateway~" + stat_name(service, region, stage)


def socket_address(address: str, port: int) -> Json:
    return {"socket_address": {"address": address, "port_value": port}}


def circuit_breakers(circuit: CircuitSpec, retry: RetrySpec) -> Json:
    """Limits per cluster; retries have a budget, not a count, so that a dying region raises no storm."""
    limits = {
        "max_connections": circuit.max_connections,
        "max_pending_requests": circuit.max_pending,
        "max_requests": circuit.max_requests,
        "retry_budget": {
            "budget_percent": {"value": retry.budget_percent},
            "min_retry_concurrency": retry.min_concurrency,
        },
        "track_remaining": True,
    }
    return {"thresholds": [limits]}


def outlier_detection() -> Json:
    """Fast and short: out after two transport failures; back after two seconds, then four, at most ten.

    Retries cannot leave a priority by themselves (consistent-hash balancers ignore `retry_priority`), so the
    ejection has to come while the retries still run, and to last until they have. Hence a passing active
    check ends none (Envoy's default): an application may answer `/health` and nothing else, and the check
    would bring it back in the middle of the retries. Answers of the application are judged only by
    502/503/504 in a row: 4xx and 429 say nothing bad about an instance.
    """
    on, off = 100, 0
    return {
        "interval": seconds(1),
        "base_ejection_time": seconds(2),
        "max_ejection_time": seconds(10),
        "max_ejection_percent": 100,
        "successful_active_health_check_uneject_host": False,
        "split_external_local_origin_errors": True,
        "consecutive_local_origin_failure": 2,
        "enforcing_consecutive_local_origin_failure": on,
        "consecutive_gateway_failure": 3,
        "enforcing_consecutive_gateway_failure": on,
        "enforcing_consecutive_5xx": off,
        "enforcing_success_rate": off,
        "enforcing_local_origin_success_rate": off,
    }


def health_check(spec: ServiceSpec) -> Json:
    """Active check through mTLS up to the application: frozen is noticed within two seconds."""
    return {
        "interval": seconds(0.5),
        "timeout": seconds(0.5),
        "initial_jitter": seconds(0.1),
        "interval_jitter_percent": 10,
        # Clusters that serve only as stand-ins must know their health before they are needed.
        "no_traffic_interval": seconds(1),
        "no_traffic_healthy_interval": seconds(1),
        "unhealthy_threshold": 2,
        "healthy_threshold": 2,
        "http_health_check": {"host": spec.name, "path": spec.health_path, "codec_client_type": "HTTP2"},
    }


_LEAVING: Json = {
    # What Consul removed is gone; Envoy would keep it for as long as its own check passes.
    "ignore_health_on_host_removal": True,
    "common_lb_config": {
        "healthy_panic_threshold": {"value": PANIC_PERCENT},
        # A group that grows must not look half dead until the newcomers' first check.
        "ignore_new_hosts_until_first_hc": True,
        # By default Envoy gathers health changes for a second after the first one: of two hosts that die
        # together the second would get traffic that long, and retries can't outlast it (measured).
        "update_merge_window": seconds(0),
    },
}


def _eds(name: str) -> Json:
    return {
        "name": name,
        "type": "EDS",
        "eds_cluster_config": {"service_name": name, "eds_config": tls.ADS},
        "connect_timeout": seconds(CONNECT_TIMEOUT_S),
    }


def _socket(spec: ServiceSpec, hop: Hop, trust_domain: str) -> Json:
    return tls.upstream(
        names.spiffe(spec.name, hop.region, trust_domain),
        names.sni(spec.name, hop.stage, hop.region, trust_domain),
    )


def _maglev() -> Json:
    config = {
        "table_size": MAGLEV_TABLE,
        "consistent_hashing_lb_config": {"hash_balance_factor": BALANCE_FACTOR},
    }
    name = "envoy.extensions.load_balancing_policies.maglev.v3.Maglev"
    return {"name": "envoy.load_balancing_policies.maglev", "typed_config": typed(name, config)}


def _round_robin() -> Json:
    name = "envoy.extensions.load_balancing_policies.round_robin.v3.RoundRobin"
    return {"name": "envoy.load_balancing_policies.round_robin", "typed_config": typed(name)}


def _http2() -> Json:
    return typed(
        _HTTP_OPTIONS,
        {
            # Two minutes: a connection through a gateway stays with one instance, and new ones must
            # come to count; so must rotated certificates. Streams outlive it: the connection drains.
            "common_http_protocol_options": {
                "idle_timeout": seconds(60),
                "max_connection_duration": seconds(120),
            },
            "explicit_http_config": {
                "http2_protocol_options": {
                    "max_concurrent_streams": STREAMS_PER_CONNECTION,
                    # A peer that is frozen or cut off sends no reset; the ping is what notices.
                    "connection_keepalive": {"interval": seconds(1), "timeout": seconds(1)},
                }
            },
        },
    )


def _wide_open() -> Json:
    """No limit here: the ingress has the limits, and its owner sees them there."""
    many = 1_000_000
    return {
        "thresholds": [
            {"max_connections": many, "max_pending_requests": many, "max_requests": many, "max_retries": many}
        ]
    }
