"""decode on answers recorded from a real agent (1.8.7), and on what a broken registration may look like."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from intentions.model import Action, Intention
from mesh.consul import decode, register
from mesh.model import Endpoint, Gateway, Health, Proxy, ProxyKind

RECORDED = Path(__file__).parents[1] / "golden" / "consul"


def recorded(name: str) -> Any:
    return json.loads((RECORDED / f"{name}.json").read_text())


def test_endpoint_from_a_recorded_answer() -> None:
    found, problems = decode.endpoints(recorded("health-connect-chat"), "chat", "us-east-1")
    assert problems == ()
    assert found == (
        Endpoint(
            service="chat",
            region="us-east-1",
            stage="stable",
            instance="chat-stable-0",
            address="127.102.1.11",
            port=21000,
            zone="us-east-1a",
            version="v1",
            model="echo",
            tenant_class="all",
        ),
    )


def test_region_is_whose_catalog_was_asked_not_what_the_meta_claims() -> None:
    body = recorded("health-connect-chat")
    body[0]["Service"]["Meta"]["region"] = "elsewhere"
    assert decode.endpoints(body, "chat", "us-east-1")[0][0].region == "us-east-1"


@pytest.mark.parametrize(
    ("statuses", "lifecycle", "health"),
    [
        (("passing", "passing"), "ready", Health.PASSING),
        (("passing", "warning"), "ready", Health.WARNING),
        (("warning", "critical"), "ready", Health.CRITICAL),
        (("critical", "passing"), "ready", Health.CRITICAL),
        (("passing", "passing"), "draining", Health.DRAINING),
        (("passing", "warning"), "draining", Health.DRAINING),
        (("passing", "critical"), "draining", Health.CRITICAL),
        *((("passing", "warning"), name, Health.ASLEEP) for name in ("asleep", "cold", "waking", "starting")),
        (("passing", "critical"), "asleep", Health.CRITICAL),
    ],
)
def test_health_is_the_worst_check_and_draining_beats_all_but_death(
    statuses: tuple[str, str], lifecycle: str, health: Health
) -> None:
    body = recorded("health-connect-chat")
    for check, status in zip(body[0]["Checks"], statuses, strict=True):
        check["Status"] = status
    body[0]["Service"]["Meta"]["lifecycle"] = lifecycle
    assert decode.endpoints(body, "chat", "us-east-1")[0][0].health is health


@pytest.mark.parametrize("lifecycle", ["ready", "asleep", "cold", "quarantined", "draining"])
def test_who_rests_is_told_by_name(lifecycle: str) -> None:
    body = recorded("health-connect-chat")
    body[0]["Service"]["Meta"]["lifecycle"] = lifecycle
    name = decode.endpoints(body[:1], "chat", "us-east-1")[0][0].instance
    others = decode.resting(body[1:])
    assert decode.resting(body) == others | ({} if lifecycle == "ready" else {name: lifecycle})


def test_weight_follows_consul_but_is_at_least_one() -> None:
    body = recorded("health-connect-chat")
    body[0]["Service"]["Weights"] = {"Passing": 7, "Warning": 1}
    assert decode.endpoints(body, "chat", "r")[0][0].weight == 7
    body[0]["Service"]["Weights"] = {"Passing": 0, "Warning": 0}
    assert decode.endpoints(body, "chat", "r")[0][0].weight == 1


def test_maintenance_mode_of_the_node_also_drains() -> None:
    body = recorded("health-connect-chat")
    body[0]["Checks"].append({"CheckID": "_node_maintenance", "Status": "critical"})
    assert decode.endpoints(body, "chat", "r")[0][0].health is Health.DRAINING


def test_a_node_address_stands_in_for_a_missing_service_address() -> None:
    body = recorded("health-connect-chat")
    body[0]["Service"]["Address"] = ""
    assert decode.endpoints(body, "chat", "r")[0][0].address == "127.102.1.1"


def test_one_broken_entry_is_left_out_and_told() -> None:
    good = recorded("health-connect-chat")[0]
    no_port, odd_check, nothing = copy.deepcopy(good), copy.deepcopy(good), {"Service": None}
    no_port["Service"] |= {"ID": "bad-port", "Port": 0}
    odd_check["Service"]["ID"] = "bad-check"
    odd_check["Checks"][0]["Status"] = "dancing"
    found, problems = decode.endpoints([no_port, good, odd_check, nothing, 7], "chat", "r")
    assert [e.instance for e in found] == ["chat-stable-0"]
    assert len(problems) == 4
    assert "bad-port" in problems[0]
    assert "dancing" in problems[1]


def test_no_list_at_all_is_a_problem_and_null_is_an_empty_list() -> None:
    assert decode.endpoints({"error": 1}, "chat", "r")[1] != ()
    assert decode.endpoints(None, "chat", "r") == ((), ())


def test_proxies_of_all_three_kinds() -> None:
    sidecar = decode.proxies(recorded("health-connect-chat"))
    assert sidecar == (
        (
            Proxy(
                id="chat-stable-0-sidecar-proxy",
                kind=ProxyKind.SIDECAR,
                service="chat",
                address="127.102.1.11",
                port=21000,
                token_sha256="ab" * 32,
                local_address="127.102.1.11",
                local_port=9000,
                stage="stable",
                zone="us-east-1a",
            ),
        ),
        (),
    )
    (ingress,), _ = decode.proxies(recorded("health-ingress-gateway"))
    assert (ingress.id, ingress.kind, ingress.service) == (
        "us-east-1-ingress",
        ProxyKind.INGRESS,
        "ingress-gateway",
    )
    (gateway,), _ = decode.proxies(recorded("health-mesh-gateway"))
    assert (gateway.kind, gateway.token_sha256) == (ProxyKind.MESH_GATEWAY, "ef" * 32)


def test_a_proxy_without_weir_kind_is_not_ours_one_with_a_wrong_kind_is_a_problem() -> None:
    body = recorded("health-connect-chat")
    del body[0]["Service"]["Meta"]["weir_kind"]
    assert decode.proxies(body) == ((), ())
    body[0]["Service"]["Meta"]["weir_kind"] = "spaceship"
    found, problems = decode.proxies(body)
    assert found == ()
    assert "spaceship" in problems[0]


def test_a_proxy_without_a_token_hash_is_refused() -> None:
    body = recorded("health-connect-chat")
    del body[0]["Service"]["Meta"]["xds_token_sha256"]
    found, problems = decode.proxies(body)
    assert found == ()
    assert "xds_token_sha256" in problems[0]


def test_gateways() -> None:
    # Nobody listened when this was recorded.
    assert decode.gateways(recorded("health-mesh-gateway"), "us-east-1") == (
        (Gateway("us-east-1", "us-east-1-mesh-gateway", "127.102.1.4", 8443, Health.CRITICAL),),
        (),
    )


def test_leaf_and_roots() -> None:
    leaf = decode.decode_leaf(recorded("leaf"))
    assert leaf.service == "chat"
    assert leaf.uri.startswith("spiffe://")
    assert leaf.uri.endswith("/ns/default/dc/us-east-1/svc/chat")
    assert leaf.not_after.endswith("Z")
    assert leaf.key_pem not in repr(leaf)
    roots = decode.decode_roots(recorded("roots"))
    assert len(roots.pems) == 1
    assert roots.trust_domain.endswith(".consul")
    assert leaf.uri.startswith(f"spiffe://{roots.trust_domain}/")


def test_the_active_root_comes_first() -> None:
    body = recorded("roots")
    old = dict(body["Roots"][0], ID="00:old", RootCert="OLD", Active=False)
    body["Roots"].insert(0, old)
    assert decode.decode_roots(body).pems[-1] == "OLD"


@pytest.mark.parametrize("body", [None, {}, [], "x", {"Roots": []}, {"Roots": [{}], "TrustDomain": "t"}])
def test_broken_leaf_and_roots_raise_one_error(body: Any) -> None:
    with pytest.raises(decode.DecodeError):
        decode.decode_leaf(body)
    with pytest.raises(decode.DecodeError):
        decode.decode_roots(body)


def test_an_error_about_a_leaf_never_tells_its_key() -> None:
    body = recorded("leaf") | {"PrivateKeyPEM": "SECRET", "CertPEM": 7}
    with pytest.raises(decode.DecodeError) as caught:
        decode.decode_leaf(body)
    assert "SECRET" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_intentions() -> None:
    rows = [
        {"SourceName": "*", "DestinationName": "*", "Action": "deny", "Description": "default"},
        {"SourceName": "ingress-gateway", "DestinationName": "chat", "Action": "allow"},
        {"SourceName": "a", "DestinationName": "b", "Permissions": [{"Action": "allow"}]},
    ]
    found, problems = decode.intentions(rows)
    assert found == (
        Intention("*", "*", Action.DENY, "default"),
        Intention("chat", "ingress-gateway", Action.ALLOW),
    )
    assert len(problems) == 1


JSONISH = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["Service", "Node", "Checks", "Meta", "weir_kind", "ID", "Port", "Proxy", "Status"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(JSONISH)
def test_no_json_makes_the_list_decoders_raise(body: Any) -> None:
    for found, problems in (
        decode.endpoints(body, "chat", "r"),
        decode.gateways(body, "r"),
        decode.proxies(body),
        decode.intentions(body),
    ):
        assert isinstance(found, tuple)
        assert all(isinstance(p, str) for p in problems)


IT = register.Instance(
    service="chat",
    id="chat-canary-0",
    region="us-east-1",
    zone="us-east-1a",
    stage="canary",
    version="v2",
    model="echo",
    tenant_class="all",
    address="127.20.1.10",
    port=9000,
    xds_token_sha256="0" * 64,
)


def test_registration_body_is_the_contract() -> None:
    body = register.instance(IT)
    assert (body["ID"], body["Name"], body["Address"], body["Port"]) == (
        "chat-canary-0",
        "chat",
        "127.20.1.10",
        9000,
    )
    assert set(body["Meta"]) == {
        "region",
        "zone",
        "stage",
        "version",
        "model",
        "tenant_class",
        "lifecycle",
    }
    (check,) = body["Checks"]
    assert check["HTTP"] == "http://127.20.1.10:9000/health"
    assert (check["Interval"], check["Timeout"]) == ("1s", "1s")
    assert check["DeregisterCriticalServiceAfter"] == "1h"
    sidecar = body["Connect"]["SidecarService"]
    assert sidecar["Port"] == 21000
    assert sidecar["Meta"] == body["Meta"] | {"xds_token_sha256": "0" * 64, "weir_kind": "sidecar"}
    assert sidecar["Checks"][0]["AliasService"] == "chat-canary-0"
    assert register.instance(replace(IT, lifecycle="draining"))["Meta"]["lifecycle"] == "draining"


def test_gateway_bodies() -> None:
    ingress = register.ingress("us-east-1", "127.20.1.3", 8443, "1" * 64)
    assert "Kind" not in ingress
    assert (ingress["ID"], ingress["Name"]) == ("us-east-1-ingress", "ingress-gateway")
    gateway = register.mesh_gateway("us-east-1", "127.20.1.4", 8443, "1" * 64)
    assert (gateway["Kind"], gateway["Meta"]["weir_kind"]) == ("mesh-gateway", "mesh-gateway")
    assert gateway["Checks"][0]["TCP"] == "127.20.1.4:8443"
