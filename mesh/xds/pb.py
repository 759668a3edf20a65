"""Envoy messages written as the JSON that Envoy's own documentation speaks.

Law: pure. `proto` gives a message whose bytes are the same for the same data, Any payloads included.
Unknown fields are an error, so a typo never reaches a proxy. Hot paths (endpoints) build messages directly.
"""

from __future__ import annotations

from typing import Any

# Any payloads are found by type name in the descriptor pool, which knows only what has been imported.
from envoy.extensions.access_loggers.stats.v3 import stats_pb2 as _stats
from envoy.extensions.access_loggers.stream.v3 import stream_pb2 as _stream
from envoy.extensions.filters.http.health_check.v3 import health_check_pb2 as _health
from envoy.extensions.filters.http.local_ratelimit.v3 import local_rate_limit_pb2 as _limit
from envoy.extensions.filters.http.rbac.v3 import rbac_pb2 as _rbac
from envoy.extensions.filters.http.router.v3 import router_pb2 as _router
from envoy.extensions.filters.listener.tls_inspector.v3 import tls_inspector_pb2 as _inspector
from envoy.extensions.filters.network.http_connection_manager.v3 import http_connection_manager_pb2 as _hcm
from envoy.extensions.filters.network.tcp_proxy.v3 import tcp_proxy_pb2 as _tcp
from envoy.extensions.load_balancing_policies.maglev.v3 import maglev_pb2 as _maglev
from envoy.extensions.load_balancing_policies.round_robin.v3 import round_robin_pb2 as _round_robin
from envoy.extensions.retry.host.previous_hosts.v3 import previous_hosts_pb2 as _previous
from envoy.extensions.transport_sockets.raw_buffer.v3 import raw_buffer_pb2 as _raw
from envoy.extensions.transport_sockets.tls.v3 import tls_pb2 as _tls
from envoy.extensions.upstreams.http.v3 import http_protocol_options_pb2 as _http
from google.protobuf import json_format

from mesh.xds.names import TYPE
from mesh.xds.resource_set import pack, unpack

Json = dict[str, Any]

LOADED = (
    _stats, _stream, _health, _limit, _rbac, _router, _inspector, _hcm, _tcp,
    _maglev, _round_robin, _previous, _raw, _tls, _http,
)  # fmt: skip
"""The modules whose messages may stand in an Any of ours."""


def typed(name: str, fields: Json | None = None) -> Json:
    """The JSON of an Any: `typed("envoy.extensions.….Router")`."""
    return {"@type": TYPE + name, **(fields or {})}


def proto(cls: Any, data: Json) -> Any:
    """A message of class `cls` from JSON data. Raises json_format.ParseError naming an unknown field."""
    message = json_format.ParseDict(data, cls())
    _settle(message)
    return message


def to_json(message: Any) -> Json:
    """JSON data of a message, field names as in the .proto files (Envoy's own spelling)."""
    data: Json = json_format.MessageToDict(message, preserving_proto_field_name=True)
    return data


def seconds(value: float) -> str:
    """A protobuf duration: 0.25 -> "0.250s"."""
    return f"{value:.3f}s"


def _settle(message: Any) -> None:
    """Give every Any inside deterministic bytes; json_format packs maps in any order."""
    if message.DESCRIPTOR.full_name == "google.protobuf.Any":
        if message.type_url:  # an empty Any means "as configured elsewhere" (FilterConfig)
            inner = unpack(message)
            _settle(inner)
            message.CopyFrom(pack(inner))
        return
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        if field.message_type.GetOptions().map_entry:
            if field.message_type.fields_by_name["value"].message_type is not None:
                for key in value:
                    _settle(value[key])
        elif field.is_repeated:
            for item in value:
                _settle(item)
        else:
            _settle(value)
