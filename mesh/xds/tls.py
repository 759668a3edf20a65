"""TLS contexts: who we are (SDS `leaf`), whom we trust (SDS `roots`), whom we expect (SPIFFE id).

Law: pure. The SDS source is one constant for every user of it: Envoy takes other bytes for another
subscription, and a second one on the same name never gets its certificate (envoy#47309).
"""

from __future__ import annotations

from mesh.xds import names
from mesh.xds.pb import Json, seconds, typed

_TLS = "envoy.extensions.transport_sockets.tls.v3."

ADS: Json = {"ads": {}, "initial_fetch_timeout": seconds(15), "resource_api_version": "V3"}
"""Config source of everything that comes from the control plane. Its bytes must stay as they are."""

_PARAMS: Json = {"tls_minimum_protocol_version": "TLSv1_2", "tls_maximum_protocol_version": "TLSv1_3"}


def _mesh(san: Json, alpn: list[str]) -> Json:
    return {
        "tls_params": _PARAMS,
        "alpn_protocols": alpn,
        "tls_certificate_sds_secret_configs": [{"name": names.LEAF_SECRET, "sds_config": ADS}],
        "combined_validation_context": {
            "default_validation_context": {
                "match_typed_subject_alt_names": [{"san_type": "URI", "matcher": san}]
            },
            "validation_context_sds_secret_config": {"name": names.ROOTS_SECRET, "sds_config": ADS},
        },
    }


def upstream(spiffe_id: str, sni: str) -> Json:
    """Transport socket towards exactly this identity. HTTP/2 inside."""
    context = {"common_tls_context": _mesh({"exact": spiffe_id}, ["h2"]), "sni": sni}
    return {
        "name": "envoy.transport_sockets.tls",
        "typed_config": typed(_TLS + "UpstreamTlsContext", context),
    }


def inbound(trust_domain: str) -> Json:
    """Transport socket of a sidecar: any identity of the trust domain gets as far as RBAC, nobody else."""
    context = {
        "common_tls_context": _mesh({"prefix": f"spiffe://{trust_domain}/"}, ["h2", "http/1.1"]),
        "require_client_certificate": True,
    }
    return {
        "name": "envoy.transport_sockets.tls",
        "typed_config": typed(_TLS + "DownstreamTlsContext", context),
    }


def public(sds_path: str) -> Json:
    """Transport socket of the ingress: certificate and key from a local SDS file."""
    source = {"path_config_source": {"path": sds_path}, "resource_api_version": "V3"}
    context = {
        "common_tls_context": {
            "tls_params": _PARAMS,
            "alpn_protocols": ["h2", "http/1.1"],
            "tls_certificate_sds_secret_configs": [{"name": names.INGRESS_TLS_SECRET, "sds_config": source}],
        }
    }
    return {
        "name": "envoy.transport_sockets.tls",
        "typed_config": typed(_TLS + "DownstreamTlsContext", context),
    }
