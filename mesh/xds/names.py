"""Names and type URLs that both sides must agree on.

Law: pure constants and formatters; nothing here reads a snapshot.
"""

from __future__ import annotations

TYPE = "type.googleapis.com/"
CLUSTER = TYPE + "envoy.config.cluster.v3.Cluster"
ENDPOINT = TYPE + "envoy.config.endpoint.v3.ClusterLoadAssignment"
LISTENER = TYPE + "envoy.config.listener.v3.Listener"
ROUTE = TYPE + "envoy.config.route.v3.RouteConfiguration"
SECRET = TYPE + "envoy.extensions.transport_sockets.tls.v3.Secret"

METADATA_HEADER = "x-envoy-upstream-metadata"
DYE_HEADER = "x-weir-dye"
SESSION_HEADER = "x-session-id"
SESSION_COOKIE = "weir-session"
TOKEN_METADATA = "x-weir-proxy-token"  # noqa: S105 - the NAME of the gRPC metadata entry
METADATA_NAMESPACE = "weir"
"""Endpoint metadata namespace: {region, stage, zone, instance}."""

ADS_CLUSTER = "weir-ads"
"""Name of the static bootstrap cluster that reaches the control plane."""

LEAF_SECRET, ROOTS_SECRET = "leaf", "roots"
INGRESS_TLS_SECRET = "ingress-tls"  # noqa: S105

META_TLS_SDS, META_HTTP_PORT = "tls_sds_path", "http_port"
"""Keys of an ingress registration's meta: path of the local SDS file; port of the plain HTTP door."""

ROUTE_CONFIG = "ingress"
"""RDS name of the ingress route table; the only resource a weight change touches."""

BY_TAG_METRIC = "consul_connect_proxy_upstream_rq_by_tag"


def cluster(service: str, region: str, stage: str) -> str:
    """Ingress cluster of one (service, region, stage), also its EDS name: `chat.cn-north-1.canary`."""
    return f"{service}.{region}.{stage}"


def sni(service: str, stage: str, region: str, trust_domain: str) -> str:
    """SNI by which a mesh gateway finds a service subset; Consul's own form with the stage as subset."""
    return f"{stage}.{service}.default.{region}.internal.{trust_domain}"


def spiffe(service: str, region: str, trust_domain: str) -> str:
    """SPIFFE id of a Connect leaf (Consul's form; one id per service and datacenter)."""
    return f"spiffe://{trust_domain}/ns/default/dc/{region}/svc/{service}"
