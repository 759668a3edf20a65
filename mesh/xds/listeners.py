"""LDS: the doors of the three kinds of proxy.

Law: pure. What changes often (weights, intentions) is not here but in routes: a changed filter chain drains
its connections. Rate limit buckets are here, so that a weight change does not fill them up again.
"""

from __future__ import annotations

from functools import lru_cache

from envoy.config.listener.v3 import listener_pb2

from mesh.model import ServiceSpec
from mesh.xds import access_logs, inbound, names, rbac, tls
from mesh.xds.clusters import gateway_name, socket_address
from mesh.xds.pb import Json, proto, seconds, typed
from mesh.xds.resource_set import Resource, make
from mesh.xds.routes import limiter

_FILTERS = "envoy.extensions.filters."

BUFFER_BYTES = 1024 * 1024
"""Soft limit per connection; also how much of a request body is kept for a retry."""

_NOBODY_INTERNAL: Json = {"cidr_ranges": [{"address_prefix": "255.255.255.255", "prefix_len": 32}]}
"""Envoy obeys x-envoy-* headers of internal clients; an empty list means "all private addresses" (measured
on 1.40: a client on loopback could set our timeouts). This one address is nobody's."""

_ROUTER: Json = {
    "name": "envoy.filters.http.router",
    "typed_config": typed(_FILTERS + "http.router.v3.Router"),
}


@lru_cache(maxsize=64)
def ingress(address: str, port: int, specs: tuple[ServiceSpec, ...], sds_path: str) -> Resource:
    """The public door; HTTPS with the certificate of the local SDS file; plain HTTP when there is none."""
    name = "ingress-https" if sds_path else "ingress-http"
    chain: Json = {"name": name, "filters": [_manager(_ingress_manager(specs))]}
    if sds_path:
        chain["transport_socket"] = tls.public(sds_path)
        chain["transport_socket_connect_timeout"] = seconds(10)
    return make(name, proto(listener_pb2.Listener, _listener(name, address, port, [chain])))


@lru_cache(maxsize=2048)
def sidecar(
    address: str, port: int, health_path: str, trust_domain: str, *, leaving: bool = False
) -> Resource:
    """The mTLS door of an instance.

    leaving: the instance takes leave or is sick. Ingresses of this region see that in EDS; those behind a
    mesh gateway hold connections to it and would send new requests for as long as these live, and their
    health check, which keeps its connection, would take the sick one for the whole region (measured). A
    chain under another name makes Envoy drain them: GOAWAY with the next answer, streams may end (within
    --drain-time-s), and the new connections go elsewhere. One that comes back, since the gateway hears of it
    later than the sidecar, is sent away with its first answer.
    """
    manager = _sidecar_manager(health_path)
    if leaving:
        manager["common_http_protocol_options"] = {"max_requests_per_connection": 1}
    chain = {
        "name": "inbound-leaving" if leaving else "inbound",
        "filters": [_manager(manager)],
        "transport_socket": tls.inbound(trust_domain),
        "transport_socket_connect_timeout": seconds(10),
    }
    data = _listener("inbound", address, port, [chain])
    return make("inbound", proto(listener_pb2.Listener, {**data, "traffic_direction": "INBOUND"}))


@lru_cache(maxsize=64)
def mesh_gateway(
    address: str, port: int, region: str, subsets: tuple[tuple[str, str], ...], trust_domain: str
) -> Resource:
    """SNI passthrough: one filter chain per (service, stage) of this region; any other name is closed.

    Envoy keeps chains that did not change, with their connections, when one beside them does.
    """
    chains = [_passthrough(service, stage, region, trust_domain) for service, stage in sorted(subsets)]
    inspector = typed(_FILTERS + "listener.tls_inspector.v3.TlsInspector")
    data = {
        **_listener("mesh-gateway", address, port, chains),
        "listener_filters": [{"name": "envoy.filters.listener.tls_inspector", "typed_config": inspector}],
        "listener_filters_timeout": seconds(5),
    }
    return make("mesh-gateway", proto(listener_pb2.Listener, data))


def _listener(name: str, address: str, port: int, chains: list[Json]) -> Json:
    return {
        "name": name,
        "address": socket_address(address, port),
        "filter_chains": chains,
        "per_connection_buffer_limit_bytes": BUFFER_BYTES,
    }


def _passthrough(service: str, stage: str, region: str, trust_domain: str) -> Json:
    config = {
        "stat_prefix": f"gateway~{service}~{stage}",
        "cluster": gateway_name(service, region, stage),
        # Silence is ended by those who know what is on the wire: HTTP/2 pings of the ingress, 1 s apart.
        "idle_timeout": seconds(120),
        "max_connect_attempts": 3,
        "access_log": access_logs.tcp(),
    }
    proxy = typed(_FILTERS + "network.tcp_proxy.v3.TcpProxy", config)
    return {
        "name": f"{service}~{stage}",
        "filter_chain_match": {"server_names": [names.sni(service, stage, region, trust_domain)]},
        "filters": [{"name": "envoy.filters.network.tcp_proxy", "typed_config": proxy}],
    }


def _manager(config: Json) -> Json:
    name = _FILTERS + "network.http_connection_manager.v3.HttpConnectionManager"
    return {"name": "envoy.filters.network.http_connection_manager", "typed_config": typed(name, config)}


def _rds(name: str) -> Json:
    return {"route_config_name": name, "config_source": tls.ADS}


def _ingress_manager(specs: tuple[ServiceSpec, ...]) -> Json:
    """Outsiders come in here: everything they could use to steer Envoy or the mesh is taken off."""
    return {
        "stat_prefix": "ingress",
        "rds": _rds(names.ROUTE_CONFIG),
        "http_filters": [*(_rate_limit(spec) for spec in specs), _ROUTER],
        "use_remote_address": True,
        "internal_address_config": _NOBODY_INTERNAL,
        "generate_request_id": True,
        "always_set_request_id_in_response": True,
        "normalize_path": True,
        "merge_slashes": True,
        "path_with_escaped_slashes_action": "REJECT_REQUEST",
        "common_http_protocol_options": {
            "idle_timeout": seconds(900),
            "headers_with_underscores_action": "REJECT_REQUEST",
        },
        "http2_protocol_options": {
            "max_concurrent_streams": 256,
            "initial_stream_window_size": 256 * 1024,
            "initial_connection_window_size": 1024 * 1024,
        },
        "max_request_headers_kb": 32,
        "request_headers_timeout": seconds(10),
        # Per stream, for what no route bounds; routes set their own.
        "stream_idle_timeout": seconds(300),
        "server_name": "weir",
        "stream_error_on_invalid_http_message": True,
        "local_reply_config": _local_replies(),
        "access_log": access_logs.ingress(),
    }


def _sidecar_manager(health_path: str) -> Json:
    return {
        "stat_prefix": "inbound",
        "rds": _rds(inbound.ROUTE_CONFIG),
        "http_filters": [_health_cache(health_path), _rbac(), _ROUTER],
        # The peer is known by its certificate; what it says of its own callers is not believed.
        "forward_client_cert_details": "SANITIZE_SET",
        "set_current_client_cert_details": {"uri": True},
        "use_remote_address": False,
        "stream_idle_timeout": seconds(0),
        "request_headers_timeout": seconds(10),
        "normalize_path": True,
        "http2_protocol_options": {
            "max_concurrent_streams": 1024,
            "initial_stream_window_size": 256 * 1024,
            "initial_connection_window_size": 4 * 1024 * 1024,
        },
        "server_header_transformation": "PASS_THROUGH",
        "access_log": access_logs.sidecar(),
    }


def _rate_limit(spec: ServiceSpec) -> Json:
    """A token bucket per service and ingress Envoy; asleep until a route of the service switches it on."""
    limit = spec.rate_limit
    all_of_it = {"default_value": {"numerator": 100, "denominator": "HUNDRED"}}
    config = {
        "stat_prefix": f"rate_limit_{spec.name}",
        "token_bucket": {
            "max_tokens": limit.burst,
            # Filled ten times a second: smoother than once, and Envoy allows no less than 50 ms.
            "tokens_per_fill": max(1, limit.requests_per_second // 10),
            "fill_interval": seconds(
                0.1 if limit.requests_per_second >= 10 else 1 / limit.requests_per_second
            ),
        },
        "filter_enabled": {**all_of_it, "runtime_key": "weir.rate_limit_enabled"},
        "filter_enforced": {**all_of_it, "runtime_key": "weir.rate_limit_enforced"},
        "response_headers_to_add": [
            {
                "header": {"key": "retry-after", "value": str(limit.retry_after_s)},
                "append_action": "OVERWRITE_IF_EXISTS_OR_ADD",
            }
        ],
    }
    name = _FILTERS + "http.local_ratelimit.v3.LocalRateLimit"
    return {"name": limiter(spec.name), "typed_config": typed(name, config), "disabled": True}


def _rbac() -> Json:
    """Denies everything; each route brings the rules that open it."""
    config = {"rules": rbac.nobody(), "rules_stat_prefix": "intentions_"}
    return {"name": inbound.RBAC_FILTER, "typed_config": typed(_FILTERS + "http.rbac.v3.RBAC", config)}


def _health_cache(path: str) -> Json:
    """Many ingresses and gateways ask; the application is asked at most four times a second."""
    config = {
        "pass_through_mode": True,
        "cache_time": seconds(0.25),
        "headers": [{"name": ":path", "string_match": {"exact": path}}],
    }
    name = _FILTERS + "http.health_check.v3.HealthCheck"
    return {"name": "envoy.filters.http.health_check", "typed_config": typed(name, config)}


def _local_replies() -> Json:
    """What the ingress itself says: JSON in the shape OpenAI clients read."""
    error = {
        "message": "%LOCAL_REPLY_BODY%",
        "type": "weir_ingress",
        "code": "%RESPONSE_CODE%",
        "reason": "%RESPONSE_CODE_DETAILS%",
        "request_id": "%REQ(X-REQUEST-ID)%",
    }
    return {"body_format": {"json_format": {"error": error}}}
