"""What one proxy is to have: named resources as ready bytes, with versions that are hashes of their content.

Law: pure. A Resource never changes; equal content gives equal bytes and an equal version on every machine.
A ResourceSet that passed `check()` has no reference that points nowhere. Nothing here knows the snapshot.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from envoy.service.discovery.v3 import discovery_pb2
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.any_pb2 import Any as AnyMessage

from mesh.xds import names

Reference = tuple[str, str]
"""(type URL, name) of another resource of the same set."""

_LEAVES = frozenset({names.ENDPOINT, names.SECRET})
"""Types that refer to nothing; walking 10,000 endpoints to learn that would be waste."""


class DanglingReference(ValueError):
    """A resource refers to one that the set has not; the message names both."""


@dataclass(frozen=True, slots=True)
class Resource:
    """One xDS resource.

    version: 16 hex digits of the sha256 of the content. body: serialised
    `envoy.service.discovery.v3.Resource` (name, version, Any), shared by every stream that sends it.
    refs: what it needs to be in the set beside it.
    """

    name: str
    type_url: str
    version: str
    body: bytes = field(repr=False)
    refs: frozenset[Reference] = field(default=frozenset(), repr=False, compare=False)

    def message(self) -> Any:
        """The inner message (Cluster, Listener, …), parsed anew. The hot path sends `body` as it is."""
        return unpack(discovery_pb2.Resource.FromString(self.body).resource)


@dataclass(frozen=True, slots=True)
class ResourceSet:
    """All resources of one proxy, by type URL and name. `version` is a hash over all of them."""

    by_type: Mapping[str, Mapping[str, Resource]]
    version: str = field(init=False)

    def __post_init__(self) -> None:
        digest = hashlib.sha256()
        for resource in self:
            digest.update(f"{resource.type_url}\0{resource.name}\0{resource.version}\n".encode())
        object.__setattr__(self, "version", digest.hexdigest()[:16])

    def __iter__(self) -> Iterator[Resource]:
        """Every resource, sorted by type URL and name."""
        for type_url in sorted(self.by_type):
            group = self.by_type[type_url]
            for name in sorted(group):
                yield group[name]

    def of(self, type_url: str) -> Mapping[str, Resource]:
        """Resources of one type by name; empty when there is none."""
        return self.by_type.get(type_url, _NOTHING)

    def check(self) -> None:
        """Raise DanglingReference when a resource refers to one that is not in the set."""
        for resource in self:
            for type_url, name in sorted(resource.refs):
                if name not in self.of(type_url):
                    raise DanglingReference(
                        f"{_short(resource.type_url)} {resource.name!r} refers to "
                        f"{_short(type_url)} {name!r}, which is not in the set"
                    )


_NOTHING: Mapping[str, Resource] = MappingProxyType({})


def make(name: str, message: Any, refs: frozenset[Reference] | None = None) -> Resource:
    """The Resource of one message (Cluster, ClusterLoadAssignment, Listener, RouteConfiguration, Secret).

    refs: what it refers to, if the caller knows; None has the message walked (dearer than building it).
    """
    packed = pack(message)
    version = hashlib.sha256(packed.value).hexdigest()[:16]
    body = discovery_pb2.Resource(name=name, version=version, resource=packed).SerializeToString(
        deterministic=True
    )
    if refs is None:
        refs = frozenset() if packed.type_url in _LEAVES else frozenset(references(message))
    return Resource(name, packed.type_url, version, body, refs)


def gather(resources: Iterable[Resource]) -> ResourceSet:
    """A set of these resources. Raises ValueError when one name comes twice within a type."""
    by_type: dict[str, dict[str, Resource]] = {}
    for resource in resources:
        group = by_type.setdefault(resource.type_url, {})
        if group.setdefault(resource.name, resource) is not resource:
            raise ValueError(f"two resources of type {_short(resource.type_url)} are named {resource.name!r}")
    return ResourceSet(MappingProxyType({t: MappingProxyType(group) for t, group in by_type.items()}))


def pack(message: Any) -> AnyMessage:
    """An Any with deterministic bytes.

    Plain `Any.Pack` leaves the order of map entries open, and Envoy takes other bytes for another
    configuration: hosts would "change" and SDS subscriptions be made anew with each push.
    """
    return AnyMessage(
        type_url=names.TYPE + message.DESCRIPTOR.full_name,
        value=message.SerializeToString(deterministic=True),
    )


def unpack(packed: AnyMessage) -> Any:
    """The message inside an Any. Its Python module must have been imported by whoever made it."""
    descriptor = descriptor_pool.Default().FindMessageTypeByName(packed.TypeName())
    return message_factory.GetMessageClass(descriptor).FromString(packed.value)


def references(message: Any) -> Iterator[Reference]:
    """What a message needs: EDS and RDS names, clusters of routes and TCP proxies, secrets over ADS."""
    kind = message.DESCRIPTOR.full_name
    if kind == "google.protobuf.Any":
        if message.type_url:
            yield from references(unpack(message))
        return
    yield from _own(kind, message)
    for descriptor, value in message.ListFields():
        if descriptor.message_type is None or descriptor.message_type.GetOptions().map_entry:
            yield from _in_map(descriptor, value)
        elif descriptor.is_repeated:
            for item in value:
                yield from references(item)
        else:
            yield from references(value)


def _in_map(descriptor: Any, value: Any) -> Iterator[Reference]:
    """The values of a map that holds messages, such as typed_per_filter_config; plain fields give nothing."""
    entry = descriptor.message_type
    if entry is not None and entry.fields_by_name["value"].message_type is not None:
        for key in sorted(value):
            yield from references(value[key])


def _own(kind: str, message: Any) -> Iterator[Reference]:
    """References that this very message makes, without its children."""
    if kind == "envoy.config.cluster.v3.Cluster" and message.HasField("eds_cluster_config"):
        yield names.ENDPOINT, message.eds_cluster_config.service_name or message.name
    elif kind == "envoy.extensions.filters.network.http_connection_manager.v3.Rds":
        yield names.ROUTE, message.route_config_name
    elif kind == "envoy.config.route.v3.RouteAction" and message.cluster:
        yield names.CLUSTER, message.cluster
    elif kind == "envoy.config.route.v3.WeightedCluster.ClusterWeight":
        yield names.CLUSTER, message.name
    elif kind == "envoy.extensions.filters.network.tcp_proxy.v3.TcpProxy" and message.cluster:
        yield names.CLUSTER, message.cluster
    elif kind == "envoy.extensions.transport_sockets.tls.v3.SdsSecretConfig" and message.sds_config.HasField(
        "ads"
    ):
        yield names.SECRET, message.name


def _short(type_url: str) -> str:
    return type_url.rsplit(".", 1)[-1]
