"""The pure core of the local world: addresses, description, wish, process list, Consul, status."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console

from mesh.model import Endpoint, Health
from mesh.world.addresses import FIRST_WORLD, LAST_WORLD, RegionAddresses
from mesh.world.consul_config import ConsulSecrets, consul_config
from mesh.world.envoys import bootstrap_of
from mesh.world.layout import MAX_SOCKET_PATH, WorldLayout, runtime_folder
from mesh.world.plan import REGISTERED, Programs, processes, proxies
from mesh.world.process import MAX_DELAY_S, delay_s
from mesh.world.show import view
from mesh.world.spec import SpecError, WorldSpec, differences, spec_from_json, spec_to_json
from mesh.world.status_model import RegionFacts, status
from mesh.world.wish import Wish, fresh, settled
from regions.cli.errors import Refused
from regions.model import Cloud, Region, RegionSet

ROWS = RegionSet(
    (
        Region("cn-north-1", Cloud.AWS, ("a", "b"), ("us-east-1",), 50, primary=True),
        Region("us-east-1", Cloud.AWS, ("a",), ("cn-north-1",), 30),
        Region("westeurope", Cloud.AZURE, ("1",), (), 20),
    )
)
SPEC = WorldSpec(number=42, regions=ROWS, services_dir="/repo/services/catalog", intentions_file="/i.yaml")
LAYOUT = WorldLayout(Path("/w/.weir"), Path("/run/weir-x"))
PROGRAMS = Programs("/bin/consul", "/bin/envoy", ("/venv/bin/weir",))
SECRETS = ConsulSecrets("R09TU0lQ", "mgmt", {"agent": "agent-token", "replication": "replication-token"})


def digests(spec: WorldSpec, region: str) -> dict[str, str]:
    return {proxy.id: f"sha-of-{proxy.id}" for proxy in proxies(spec, region)}


@given(
    st.integers(FIRST_WORLD, LAST_WORLD), st.integers(1, 250), st.integers(FIRST_WORLD, LAST_WORLD),
    st.integers(1, 250),
)  # fmt: skip
def test_no_two_regions_share_a_listener(w1: int, r1: int, w2: int, r2: int) -> None:
    one = {(x.host, x.port) for x in RegionAddresses(w1, r1).listeners(3, http=True)}
    two = {(x.host, x.port) for x in RegionAddresses(w2, r2).listeners(3, http=True)}
    assert len(one) == 11 + 3 * 4
    assert (one == two) == ((w1, r1) == (w2, r2))
    assert (w1, r1) == (w2, r2) or not one & two


@pytest.mark.parametrize(("world", "index"), [(19, 1), (251, 1), (20, 0), (20, 251)])
def test_addresses_outside_the_plan_are_refused(world: int, index: int) -> None:
    with pytest.raises(ValueError, match="outside"):
        RegionAddresses(world, index)


def test_address_plan_is_the_contract() -> None:
    at = SPEC.addresses("us-east-1")
    assert at.consul_http == "http://127.42.2.1:8500"
    assert at.control_plane_http == "http://127.42.2.2:9102"
    assert at.ingress_https == "https://127.42.2.3:8443"
    assert at.mesh_gateway_peer == "127.42.2.4:8443"
    assert at.instance(0) == "127.42.2.10"


def test_rows_carry_their_loopback_gateways() -> None:
    row = SPEC.regions.get("westeurope")
    assert row is not None
    assert (row.gateways.ingress, row.gateways.mesh) == ("127.42.3.3:8443", "127.42.3.4:8443")


def test_description_survives_json() -> None:
    spec = replace(SPEC, http=True, acl=True, instances=3, canaries=0, token_cost_ms=0.5)
    assert spec_from_json(json.loads(json.dumps(spec_to_json(spec)))) == spec


@pytest.mark.parametrize("drop", ["number", "regions", "acl", "instances"])
def test_description_with_a_hole_is_refused(drop: str) -> None:
    body = spec_to_json(SPEC)
    del body[drop]
    with pytest.raises(SpecError):
        spec_from_json(body)


@pytest.mark.parametrize("bad", [{"instances": 0}, {"canaries": -1}, {"instances": 999}, {"tls_cert": "x"}])
def test_nonsense_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(SpecError):
        replace(SPEC, **bad)


def test_process_list(golden_json: Any) -> None:
    plans = processes(SPEC, LAYOUT.region("cn-north-1"), PROGRAMS, digests(SPEC, "cn-north-1"))
    golden_json(
        "world/processes.json",
        [
            {
                "name": p.name,
                "argv": list(p.argv),
                "env": dict(p.env),
                "ready": [p.ready.kind, p.ready.url, p.ready.what, p.ready.digest],
                "after": list(p.after),
                "stop": p.stop,
                "grace_s": p.grace_s,
            }
            for p in plans
        ],
    )


def test_whatever_a_process_waits_for_comes_before_it() -> None:
    for spec in (SPEC, replace(SPEC, acl=True, instances=5, canaries=0)):
        seen = {REGISTERED}
        for plan in processes(spec, LAYOUT.region("us-east-1"), PROGRAMS, digests(spec, "us-east-1")):
            assert set(plan.after) <= seen
            seen.add(plan.name)


def test_with_acls_each_process_has_its_own_role() -> None:
    spec = replace(SPEC, acl=True)
    plans = {
        p.name: p for p in processes(spec, LAYOUT.region("us-east-1"), PROGRAMS, digests(spec, "us-east-1"))
    }
    token = "CONSUL_HTTP_TOKEN_FILE"
    assert plans["control-plane"].env[token] == "/w/.weir/tokens/control-plane"
    assert plans["chat-stable-0"].env[token] == "/w/.weir/tokens/instance-chat"
    assert token not in plans["ingress"].env
    assert plans["chat-stable-0"].after == (REGISTERED,)


def test_consul_configuration(golden_json: Any) -> None:
    golden_json("world/consul.json", consul_config(SPEC, "cn-north-1", "/data", SECRETS, (1, 8, 7)))


@pytest.mark.parametrize(
    ("region", "version", "name"),
    [("cn-north-1", (1, 8, 7), "primary-1.8"), ("us-east-1", (1, 16, 0), "secondary-1.16")],
)
def test_consul_configuration_with_acls(
    golden_json: Any, region: str, version: tuple[int, int, int], name: str
) -> None:
    config = consul_config(replace(SPEC, acl=True), region, "/data", SECRETS, version)
    golden_json(f"world/consul-acl-{name}.json", config)


def test_bootstrap_holds_the_token_and_binds_to_its_own_address() -> None:
    proxy = proxies(SPEC, "us-east-1")[0]
    body = bootstrap_of(SPEC, LAYOUT.region("us-east-1"), proxy, "s3cret")
    assert body["node"]["id"] == "us-east-1-ingress"
    assert body["cluster_manager"]["upstream_bind_config"]["source_address"]["address"] == "127.42.2.3"
    assert "s3cret" in json.dumps(body["dynamic_resources"])


def test_secrets_are_not_shown() -> None:
    assert "mgmt" not in repr(SECRETS)
    assert "agent-token" not in repr(SECRETS)


@given(st.text("abcdefghij/", min_size=1, max_size=300), st.text("abc", max_size=120), st.integers(1, 63))
@example("a", "a" * 14, 63)  # the longest of all
def test_socket_paths_stay_short(folder: str, base: str, longest: int) -> None:
    runtime = runtime_folder(Path("/" + folder), {"XDG_RUNTIME_DIR": f"/{base}"}, 4_294_967_295, longest)
    assert len(str(WorldLayout(Path("/x"), runtime).region("r" * longest).ads_socket)) <= MAX_SOCKET_PATH


def test_two_folders_have_two_runtime_folders() -> None:
    assert runtime_folder(Path("/a"), {}, 0, 10) != runtime_folder(Path("/b"), {}, 0, 10)


@given(st.integers(1, 10_000), st.integers())
def test_back_off_grows_and_is_bounded(failures: int, seed: int) -> None:
    assert 0 < delay_s(failures, Random(seed)) <= MAX_DELAY_S
    assert delay_s(failures, Random(seed)) <= delay_s(failures + 1, Random(seed))


def test_same_wish_again_changes_nothing() -> None:
    for wish in (Wish(), Wish(instances=2, regions=("westeurope", "us-east-1", "cn-north-1"), subnet=42)):
        assert settled(SPEC, wish, ROWS, running=("us-east-1",), kept=True) == SPEC


@pytest.mark.parametrize(
    "wish",
    [Wish(instances=3), Wish(regions=("us-east-1",)), Wish(subnet=43), Wish(acl=True), Wish(http=True)],
)
def test_another_shape_is_refused_while_it_runs(wish: Wish) -> None:
    with pytest.raises(Refused, match="it runs"):
        settled(SPEC, wish, ROWS, running=("us-east-1",), kept=True)


def test_kept_data_pins_addresses_and_acls_only() -> None:
    for wish in (Wish(regions=("us-east-1",)), Wish(subnet=43), Wish(acl=True)):
        with pytest.raises(Refused, match="purge"):
            settled(SPEC, wish, ROWS, running=(), kept=True)
        assert settled(SPEC, wish, ROWS, running=(), kept=False) != SPEC
    assert settled(SPEC, Wish(instances=4, http=True), ROWS, running=(), kept=True).instances == 4


def test_a_stopped_world_takes_its_rows_anew() -> None:
    heavier = RegionSet((replace(ROWS.regions[0], weight=99), *ROWS.regions[1:]))
    row = settled(SPEC, Wish(), heavier, running=(), kept=True).regions.get("cn-north-1")
    assert row is not None
    assert row.weight == 99
    assert settled(SPEC, Wish(), heavier, running=("us-east-1",), kept=True) == SPEC


def test_a_new_world_without_the_primary_has_another() -> None:
    spec = fresh(Wish(regions=("us-east-1",)), ROWS, 20, {"services_dir": "/s"})
    assert (spec.primary, spec.names, spec.services_dir) == ("us-east-1", ("us-east-1",), "/s")


def test_differences_name_field_old_and_new() -> None:
    assert differences(SPEC, replace(SPEC, instances=5)) == {"instances": ("2", "5")}


def document(region: str, decided: float, canary: float, requests: int, share: float) -> dict[str, Any]:
    return {
        "service": "chat",
        "region": region,
        "canary_weight": {"value": canary, "key": "config/traffic/canary-weight"},
        "regions": {"cn-north-1": 0.7, "us-east-1": 0.3},
        "evacuated": [],
        "acknowledged": 1,
        "connected": 1,
        "applied": True,
        "refusals": [{"key": "config/traffic/canary-weight", "reason": "not a number", "kv_index": 3}],
        "nacks": [],
        "observed": {"canary": share, "regions": {"cn-north-1": 1.0}, "requests": requests},
        "times": {"decided": decided},
    }


def test_status_has_the_promised_keys(golden_json: Any) -> None:
    end = Endpoint("chat", "cn-north-1", "stable", "chat-stable-0", "127.42.1.10", 21000)
    found = {
        "cn-north-1": RegionFacts(
            ready=True,
            supervisor=7,
            processes={"consul": "ready"},
            endpoints=(end, replace(end, instance="chat-stable-1", health=Health.CRITICAL)),
            documents={"chat": document("cn-north-1", 10.0, 0.15, 300, 0.2)},
            resting={"chat-stable-1": "asleep"},
        ),
        "us-east-1": RegionFacts(ready=True, documents={"chat": document("us-east-1", 20.0, 0.3, 100, 0.4)}),
    }
    body = status(SPEC, "/w/.weir/tls/ca.pem", found)
    golden_json("world/status.json", body)
    chat = body["traffic"]["chat"]
    assert chat["canary_weight"]["value"] == 0.3  # the region that decided last is ahead
    assert chat["observed"] == {"canary": 0.25, "regions": {"cn-north-1": 1.0}, "requests": 400}
    assert not body["regions"]["westeurope"]["ready"]
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(view(body))
    [line] = [text for text in console.export_text().splitlines() if "127.42.1.1:8500" in text]
    assert "chat-stable-1 asleep" in line


def test_status_of_a_world_that_is_down() -> None:
    body = status(SPEC, "/ca", {})
    assert [row["ready"] for row in body["regions"].values()] == [False] * 3
    assert body["traffic"]["chat"]["canary_weight"] is None
    assert body["traffic"]["chat"]["observed"]["requests"] == 0


def test_a_vllm_world_is_small_unless_somebody_says_otherwise() -> None:
    assert (
        fresh(Wish(engine="vllm"), ROWS, 20, {}).instances,
        fresh(Wish(engine="vllm"), ROWS, 20, {}).canaries,
    ) == (1, 0)
    assert fresh(Wish(engine="vllm", canaries=1), ROWS, 20, {}).canaries == 1
    assert fresh(Wish(), ROWS, 20, {}).total == 3


def test_another_engine_takes_its_own_model_and_numbers_along() -> None:
    torch = settled(SPEC, Wish(engine="torch"), ROWS, running=(), kept=False)
    assert {m.model for m in torch.members("cn-north-1")} == {"smollm2-135m-instruct"}
    back = settled(
        replace(torch, options=("threads=2",), model="/m"), Wish(engine="echo"), ROWS, running=(), kept=False
    )
    assert (back.model, back.options, back.instances, back.canaries) == ("", (), 2, 1)
    kept = settled(replace(torch, model="/m"), Wish(), ROWS, running=(), kept=False)
    assert kept.model == "/m"


def test_an_option_that_was_wrong_is_gone_when_the_engine_is_named_again() -> None:
    wrong = replace(SPEC, engine="sim", options=("bla=1",), settings=("bla=2",), model="m", instances=1)
    again = settled(wrong, Wish(engine="sim"), ROWS, running=(), kept=True)
    assert (again.options, again.settings, again.model, again.instances) == ((), (), "", 1)
    said = settled(wrong, Wish(engine="sim", options=("speed=2",)), ROWS, running=(), kept=True)
    assert said.options == ("speed=2",)
    assert settled(wrong, Wish(engine="sim"), ROWS, running=("cn-north-1",), kept=True) == wrong


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ({"engine": "gpt"}, "gpt"),
        ({"options": ("slots",)}, "option: 'slots'"),
        ({"settings": ("pool.busy",)}, "set: 'pool.busy'"),
    ],
)
def test_an_engine_or_option_that_makes_no_sense_is_named(said: dict[str, Any], named: str) -> None:
    with pytest.raises(SpecError, match=named):
        replace(SPEC, **said)


def test_engine_options_reach_the_executors() -> None:
    spec = replace(SPEC, engine="sim", options=("slots=4", "speed=2"), settings=("pool.busy=0.9",))
    assert spec_from_json(spec_to_json(spec)) == spec
    plans = processes(spec, LAYOUT.region("us-east-1"), PROGRAMS, digests(spec, "us-east-1"))
    first = next(p for p in plans if p.name.startswith("chat-stable"))
    assert first.argv[first.argv.index("--engine") :][:8] == (
        "--engine",
        "sim",
        "--option",
        "slots=4",
        "--option",
        "speed=2",
        "--set",
        "pool.busy=0.9",
    )
