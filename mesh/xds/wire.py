"""Delta xDS messages as plain values, and their bytes.

Law: pure. Requests are parsed once, at this edge; responses are put together from ready bytes, so that a body
which goes to a thousand streams is built once and only the nonce is laid behind it (protobuf allows fields in
any order, and concatenation is how messages merge).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from envoy.service.discovery.v3 import discovery_pb2

from mesh.xds.resource_set import Resource

_NONE: Mapping[str, str] = MappingProxyType({})

# Field numbers of DeltaDiscoveryResponse, as tags of length-delimited fields (number << 3 | 2).
_RESOURCES, _TYPE_URL, _NONCE, _REMOVED = b"\x12", b"\x22", b"\x2a", b"\x32"


class BadRequest(ValueError):
    """The client sent what is no request, or more than a client has any use for."""


@dataclass(frozen=True, slots=True)
class Request:
    """A DeltaDiscoveryRequest. `error` is None for an ACK and the client's words for a NACK."""

    type_url: str
    subscribe: tuple[str, ...] = ()
    unsubscribe: tuple[str, ...] = ()
    initial_versions: Mapping[str, str] = field(default_factory=lambda: _NONE)
    nonce: str = ""
    error: str | None = None
    node_id: str = ""


@dataclass(frozen=True, slots=True)
class Push:
    """One DeltaDiscoveryResponse to send. `nonce` is unique on its stream and grows."""

    type_url: str
    upserts: tuple[Resource, ...]
    removed: tuple[str, ...]
    nonce: str

    @property
    def names(self) -> tuple[str, ...]:
        """All names that this push speaks of."""
        return (*(r.name for r in self.upserts), *self.removed)

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for pushes whose body has the same bytes on every stream (versions are content hashes)."""
        return (self.type_url, tuple((r.name, r.version) for r in self.upserts), self.removed)


def decode_request(data: bytes) -> Request:
    """Parse a DeltaDiscoveryRequest. Raises BadRequest when the bytes are none."""
    try:
        message = discovery_pb2.DeltaDiscoveryRequest.FromString(data)
    except Exception as error:  # upb raises DecodeError, of a module that differs between versions
        raise BadRequest(f"not a DeltaDiscoveryRequest: {error}") from error
    failed = message.HasField("error_detail")
    return Request(
        type_url=message.type_url,
        subscribe=tuple(message.resource_names_subscribe),
        unsubscribe=tuple(message.resource_names_unsubscribe),
        initial_versions=dict(message.initial_resource_versions)
        if message.initial_resource_versions
        else _NONE,
        nonce=message.response_nonce,
        error=(message.error_detail.message or "rejected without a word") if failed else None,
        node_id=message.node.id,
    )


def encode_body(push: Push) -> bytes:
    """Everything of the response but its nonce: type, resources in push order, removed names."""
    parts = [_field(_TYPE_URL, push.type_url.encode())]
    parts += [_field(_RESOURCES, resource.body) for resource in push.upserts]
    parts += [_field(_REMOVED, name.encode()) for name in push.removed]
    return b"".join(parts)


def with_nonce(body: bytes, nonce: str) -> bytes:
    """The whole response of one stream."""
    return body + _field(_NONCE, nonce.encode())


def _field(tag: bytes, value: bytes) -> bytes:
    return tag + _varint(len(value)) + value


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)
