"""What a proxy writes down about each request: JSON lines, and counters by tag.

Law: pure data. Tag values come from endpoint and route metadata only, which have few values; a value that a
client can choose must never become a tag, for every value is a counter that is never freed.
"""

from __future__ import annotations

from mesh.xds import names
from mesh.xds.pb import Json, typed

_SCOPE = names.METADATA_NAMESPACE

STATS_PREFIX, STATS_NAME = "consul_connect_proxy", "upstream_rq_by_tag"
"""Joined with a dot in Envoy's statistics; in Prometheus form `envoy_` + names.BY_TAG_METRIC (see docs of the
relabel rule): Envoy puts its own prefix before every name that is not a Wasm module's."""

_INGRESS: Json = {
    "time": "%START_TIME%",
    "method": "%REQ(:METHOD)%",
    "path": "%REQ(X-ENVOY-ORIGINAL-PATH?:PATH)%",
    "authority": "%REQ(:AUTHORITY)%",
    "protocol": "%PROTOCOL%",
    "status": "%RESPONSE_CODE%",
    "details": "%RESPONSE_CODE_DETAILS%",
    "flags": "%RESPONSE_FLAGS%",
    "service": f"%METADATA(ROUTE:{_SCOPE}:service)%",
    "region": f"%UPSTREAM_METADATA({_SCOPE}:region)%",
    "stage": f"%UPSTREAM_METADATA({_SCOPE}:stage)%",
    "instance": f"%UPSTREAM_METADATA({_SCOPE}:instance)%",
    "colour": "%RESP(X-ENVOY-UPSTREAM-METADATA)%",
    "dye": f"%REQ({names.DYE_HEADER.upper()})%",
    "cluster": "%UPSTREAM_CLUSTER_RAW%",
    "upstream": "%UPSTREAM_HOST%",
    "upstream_failure": "%UPSTREAM_TRANSPORT_FAILURE_REASON%",
    "attempts": "%UPSTREAM_REQUEST_ATTEMPT_COUNT%",
    "bytes_in": "%BYTES_RECEIVED%",
    "bytes_out": "%BYTES_SENT%",
    "duration_ms": "%DURATION%",
    "first_byte_ms": "%RESPONSE_DURATION%",
    "client": "%DOWNSTREAM_REMOTE_ADDRESS_WITHOUT_PORT%",
    "request_id": "%REQ(X-REQUEST-ID)%",
    "user_agent": "%REQ(USER-AGENT)%",
}

_SIDECAR: Json = {
    "time": "%START_TIME%",
    "method": "%REQ(:METHOD)%",
    "path": "%REQ(:PATH)%",
    "status": "%RESPONSE_CODE%",
    "details": "%RESPONSE_CODE_DETAILS%",
    "flags": "%RESPONSE_FLAGS%",
    "peer": "%DOWNSTREAM_PEER_URI_SAN%",
    "duration_ms": "%DURATION%",
    "request_id": "%REQ(X-REQUEST-ID)%",
}

_TCP: Json = {
    "time": "%START_TIME%",
    "sni": "%REQUESTED_SERVER_NAME%",
    "flags": "%RESPONSE_FLAGS%",
    "upstream": "%UPSTREAM_HOST%",
    "client": "%DOWNSTREAM_REMOTE_ADDRESS%",
    "bytes_in": "%BYTES_RECEIVED%",
    "bytes_out": "%BYTES_SENT%",
    "duration_ms": "%DURATION%",
}


def ingress() -> list[Json]:
    """One JSON line per request, and the counter behind the users' dashboards."""
    return [_stdout(_INGRESS), by_tag()]


def sidecar() -> list[Json]:
    """Errors only: the ingress has logged the rest, with more to say."""
    minimum = {"default_value": 400, "runtime_key": "weir.sidecar_log_min_status"}
    errors = {"status_code_filter": {"comparison": {"op": "GE", "value": minimum}}}
    return [{**_stdout(_SIDECAR), "filter": errors}]


def tcp() -> list[Json]:
    """Connections through a mesh gateway that ended badly."""
    return [{**_stdout(_TCP), "filter": {"response_flag_filter": {}}}]


def by_tag() -> Json:
    """Counter per (service, region, stage, code): the instance that answered last, "-" when none did."""
    tags = {
        "service": f"%METADATA(ROUTE:{_SCOPE}:service)%",
        "region": f"%UPSTREAM_METADATA({_SCOPE}:region)%",
        "stage": f"%UPSTREAM_METADATA({_SCOPE}:stage)%",
        "code": "%RESPONSE_CODE%",
    }
    counter = {
        "stat": {"name": STATS_NAME, "tags": [{"name": k, "value_format": v} for k, v in tags.items()]},
        "value_fixed": 1,
    }
    config = {"stat_prefix": STATS_PREFIX, "counters": [counter]}
    return {
        "name": "envoy.access_loggers.stats",
        "typed_config": typed("envoy.extensions.access_loggers.stats.v3.Config", config),
    }


def _stdout(fields: Json) -> Json:
    config = {"log_format": {"json_format": fields}}
    return {
        "name": "envoy.access_loggers.stdout",
        "typed_config": typed("envoy.extensions.access_loggers.stream.v3.StdoutAccessLog", config),
    }
