"""ResourceSet: versions from content, references that must resolve."""

from __future__ import annotations

import pytest
from envoy.config.cluster.v3 import cluster_pb2
from envoy.config.endpoint.v3 import endpoint_pb2
from envoy.config.listener.v3 import listener_pb2
from envoy.config.route.v3 import route_pb2
from google.protobuf import struct_pb2

from mesh.xds import names, tls
from mesh.xds.pb import proto, typed
from mesh.xds.resource_set import DanglingReference, gather, make, pack


def cluster(name: str, socket: bool = False) -> cluster_pb2.Cluster:
    data = {"name": name, "type": "EDS", "eds_cluster_config": {"eds_config": tls.ADS}}
    return proto(
        cluster_pb2.Cluster,
        {**data, **({"transport_socket": tls.upstream("spiffe://x", "y")} if socket else {})},
    )


def route(name: str, target: str) -> route_pb2.RouteConfiguration:
    way = {"match": {"prefix": "/"}, "route": {"cluster": target}}
    return proto(
        route_pb2.RouteConfiguration,
        {"name": name, "virtual_hosts": [{"name": "v", "domains": ["*"], "routes": [way]}]},
    )


def listener(name: str, rds: str) -> listener_pb2.Listener:
    kind = "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
    hcm = {"stat_prefix": "s", "rds": {"route_config_name": rds, "config_source": tls.ADS}}
    return proto(
        listener_pb2.Listener,
        {"name": name, "filter_chains": [{"filters": [{"name": "hcm", "typed_config": typed(kind, hcm)}]}]},
    )


def eds(name: str) -> endpoint_pb2.ClusterLoadAssignment:
    return endpoint_pb2.ClusterLoadAssignment(cluster_name=name)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([("a", cluster("a"))], ["Cluster 'a'", "ClusterLoadAssignment 'a'"]),
        ([("r", route("r", "gone"))], ["RouteConfiguration 'r'", "Cluster 'gone'"]),
        ([("l", listener("l", "nowhere"))], ["Listener 'l'", "RouteConfiguration 'nowhere'"]),
        ([("a", cluster("a", socket=True)), ("a", eds("a"))], ["Cluster 'a'", "Secret 'leaf'"]),
    ],
)
def test_a_reference_that_points_nowhere_names_both_ends(messages, words) -> None:
    with pytest.raises(DanglingReference) as caught:
        gather(make(name, message) for name, message in messages).check()
    for word in words:
        assert word in str(caught.value)


def test_a_whole_set_passes() -> None:
    gather(
        [
            make("a", cluster("a")),
            make("a", eds("a")),
            make("r", route("r", "a")),
            make("l", listener("l", "r")),
        ]
    ).check()


def test_a_secret_from_a_local_file_is_no_reference_to_the_set() -> None:
    data = {"filter_chains": [{"transport_socket": tls.public("/x.json")}]}
    assert make("l", proto(listener_pb2.Listener, data)).refs == frozenset()


def test_equal_content_has_equal_bytes_whatever_the_order_of_maps() -> None:
    def packed(keys):
        value = struct_pb2.Struct()
        for key in keys:
            value.fields[key].string_value = key
        return pack(pack(value)).SerializeToString()

    keys = [f"key-{n}" for n in range(30)]
    assert packed(keys) == packed(reversed(keys))


def test_versions_follow_content_and_the_set_follows_its_parts() -> None:
    one, other = make("a", cluster("a")), make("a", cluster("a", socket=True))
    assert one.version == make("a", cluster("a")).version != other.version
    assert gather([one]).version == gather([make("a", cluster("a"))]).version != gather([other]).version
    assert one.message() == cluster("a")
    assert one.type_url == names.CLUSTER


def test_one_name_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="named 'a'"):
        gather([make("a", cluster("a")), make("a", cluster("a", socket=True))])
