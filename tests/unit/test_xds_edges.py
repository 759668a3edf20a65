"""The edges of the ADS core: bytes, fuzz, who may read, load reports, the shared bodies.

Law: pure.
"""

from __future__ import annotations

import hashlib

import pytest
from envoy.service.discovery.v3 import discovery_pb2
from envoy.service.load_stats.v3 import lrs_pb2
from hypothesis import given
from hypothesis import strategies as st

from mesh.model import Proxy, ProxyKind
from mesh.xds import auth, lrs, names, subscription
from mesh.xds.bodies import Bodies
from mesh.xds.stream import MAX_TYPES, DeltaStream
from mesh.xds.wire import BadRequest, Push, Request, decode_request, encode_body, with_nonce
from tests.fakes.sets import cluster, endpoints, simple

A = "chat.cn-north-1.stable"


def proxy(name: str, token: str) -> Proxy:
    return Proxy(
        name, ProxyKind.SIDECAR, "chat", "127.104.1.10", 21_000, hashlib.sha256(token.encode()).hexdigest()
    )


PROXIES = {"a": proxy("a", "secret-a"), "b": proxy("b", "secret-b")}


@given(st.text(max_size=300), st.integers(0, 10**12))
def test_concatenated_bytes_are_the_message(name: str, nonce: int) -> None:
    push = Push(names.CLUSTER, (cluster(A), cluster("b")), (name,), str(nonce))
    message = discovery_pb2.DeltaDiscoveryResponse.FromString(with_nonce(encode_body(push), push.nonce))
    assert [r.SerializeToString(deterministic=True) for r in message.resources] == [
        r.body for r in push.upserts
    ]
    assert (message.type_url, message.nonce, list(message.removed_resources)) == (
        names.CLUSTER,
        str(nonce),
        [name],
    )


@given(st.binary(max_size=200))
def test_any_bytes_are_a_request_or_a_bad_request(data: bytes) -> None:
    core = DeltaStream("p", 0.0)
    core.publish(simple({A: 10_000}))
    try:
        request = decode_request(data)
    except BadRequest:
        return
    core.request(request, 0.0)
    core.poll(0.0)


def test_a_client_cannot_make_us_grow_without_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    core = DeltaStream("p", 0.0)
    for number in range(MAX_TYPES):
        core.request(Request(f"t{number}"), 0.0)
    with pytest.raises(BadRequest, match="types"):
        core.request(Request("one more"), 0.0)
    monkeypatch.setattr(subscription, "MAX_NAMES", 10)
    with pytest.raises(BadRequest, match="names"):
        core.request(Request("t0", tuple(map(str, range(11)))), 0.0)
    with pytest.raises(BadRequest, match="versions"):
        DeltaStream("p", 0.0).request(Request("t", initial_versions={str(n): "" for n in range(11)}), 0.0)


def test_bodies_are_built_once_and_bounded() -> None:
    bodies = Bodies(max_entries=2)
    one = Push(names.CLUSTER, (cluster(A),), (), "1")
    same = Push(names.CLUSTER, (cluster(A),), (), "9")
    assert bodies.of(one) is bodies.of(same)
    assert bodies.built == 1
    for port in range(10):
        bodies.of(Push(names.ENDPOINT, (endpoints(A, port),), (), "1"))
    bodies.of(one)
    assert bodies.built == 12


@pytest.mark.parametrize(
    ("node", "token", "why"),
    [
        ("a", "", auth.Why.TOKEN),
        ("a", "nonsense", auth.Why.TOKEN),
        ("a", "secret-b", auth.Why.STOLEN),
        ("nobody", "secret-b", auth.Why.STOLEN),
        ("nobody", "fresh", auth.Why.UNKNOWN),
        ("", "", auth.Why.UNKNOWN),
    ],
)
def test_thieves_and_strangers(node: str, token: str, why: auth.Why) -> None:
    with pytest.raises(auth.Denied) as denied:
        auth.check(PROXIES, node, token)
    assert denied.value.why is why
    assert "secret" not in str(denied.value)


def test_the_owner_is_let_in() -> None:
    assert auth.authenticator(lambda: PROXIES)("b", "secret-b") is PROXIES["b"]


def test_an_empty_token_is_no_token_even_if_registered() -> None:
    careless = {"c": proxy("c", "")}
    with pytest.raises(auth.Denied):
        auth.check(careless, "c", "")


def test_load_reports_tell_where_requests_really_went() -> None:
    report = lrs_pb2.LoadStatsRequest()
    report.node.id = "ingress"
    stats = report.cluster_stats.add(cluster_name="chat.v2.cn-north-1.canary")
    stats.load_report_interval.FromMilliseconds(1250)
    for region, stage, issued, errors in (
        ("cn-north-1", "canary", 10, 1),
        ("us-east-1", "stable", 3, 0),
        ("x", "y", 0, 0),
    ):
        local = stats.upstream_locality_stats.add(total_issued_requests=issued, total_error_requests=errors)
        local.locality.region, local.locality.sub_zone = region, stage
    report.cluster_stats.add(cluster_name="weir-ads").upstream_locality_stats.add(total_issued_requests=5)
    assert lrs.decode_report(report.SerializeToString()) == (
        "ingress",
        [
            lrs.LoadSample("chat.v2", "cn-north-1", "canary", 10, 1, 1.25),
            lrs.LoadSample("chat.v2", "us-east-1", "stable", 3, 0, 1.25),
        ],
    )


@given(st.binary(max_size=100))
def test_any_bytes_are_a_report_or_a_bad_request(data: bytes) -> None:
    try:
        lrs.decode_report(data)
    except BadRequest:
        return


def test_what_is_asked_of_envoy() -> None:
    message = lrs_pb2.LoadStatsResponse.FromString(lrs.response())
    assert message.send_all_clusters
    assert not message.report_endpoint_granularity
    assert message.load_reporting_interval.seconds == 1
