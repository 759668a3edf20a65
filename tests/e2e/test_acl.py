"""Two regions with Consul's ACLs on, default deny: everything works, and each role does its own work only.

Law: a world of its own, taken down at the end. Tokens are those that `weir up --acl` made.
"""

from __future__ import annotations

import json
import os
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import pytest

from mesh.consul.acl import roles_for
from mesh.world import strays
from mesh.world.plan import CONTROL_PLANE
from mesh.world.runner import weir_command
from tests.e2e.mesh_world import CANARY, REPO, MeshWorld, brought_up, failures, stage_share

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

FIRST, SECOND = "cn-north-1", "us-east-1"
REFUSED = 403


@pytest.fixture(scope="module")
def denying(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshWorld]:
    wish = ("--acl", "--regions", f"{FIRST},{SECOND}", "--instances", "1", "--canaries", "1")
    with brought_up(tmp_path_factory.mktemp("acl") / ".weir", *wish, "--subnet", "125") as world:
        yield world


@dataclass(frozen=True)
class Deed:
    """An HTTP call to Consul that needs a right."""

    method: str
    path: str
    body: bytes | None = None


def _kv(key: str) -> Deed:
    return Deed("PUT", f"/v1/kv/{key}", b"0")


def _leaf(service: str) -> Deed:
    return Deed("GET", f"/v1/agent/connect/ca/leaf/{service}")


_RULE = json.dumps(
    {"SourceName": "acl-test", "DestinationName": "acl-test", "SourceType": "consul", "Action": "deny"}
).encode()

DEEDS = {
    "read config": Deed("GET", f"/v1/kv/{CANARY}"),
    "write config": _kv("config/traffic/"),  # the marker itself: written again, nothing changes
    "write status": _kv("status/acl-test"),
    "write audit": _kv("audit/acl-test"),
    "write history": _kv("drills/acl-test"),
    "write elsewhere": _kv("acl-test"),
    "leaf of chat": _leaf("chat"),
    "leaf of ingress": _leaf("ingress-gateway"),
    "read intentions": Deed("GET", "/v1/connect/intentions/check?source=acl-test&destination=chat"),
    "write intention": Deed("POST", "/v1/connect/intentions", _RULE),
    "list tokens": Deed("GET", "/v1/acl/tokens"),
}
MAY = {
    "": set(),
    "control-plane": {"read config", "write config", "write status", "leaf of chat", "leaf of ingress"}
    | {"read intentions"},
    "instance-chat": {"leaf of chat", "read intentions"},
    "ingress": {"leaf of ingress"},
    "mesh-gateway": set(),
    "operator": {"read config", "write config", "write audit", "read intentions", "write intention"},
    "drill": {"read config", "write config", "write audit", "write history", "read intentions"},
    "agent": {"read intentions"},
}


def _try(world: MeshWorld, region: str, token: str, deed: Deed) -> tuple[int, bytes]:
    url = world.world.address(region).consul_http + deed.path
    request = urllib.request.Request(url, data=deed.body, method=deed.method)
    if token:
        request.add_header("X-Consul-Token", token)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def _token(world: MeshWorld, role: str) -> str:
    return world.world.token_of(role) if role else ""


def test_without_a_token_there_is_nothing_to_be_seen(denying: MeshWorld) -> None:
    denying.put(SECOND, CANARY, "0.1")
    denying.applied(0.1)
    for region in denying.names:
        assert _try(denying, region, "", Deed("GET", f"/v1/kv/{CANARY}"))[0] == REFUSED
        assert _try(denying, region, "", Deed("GET", "/v1/kv/config/traffic/?recurse"))[0] == 404
        assert _try(denying, region, "", Deed("GET", "/v1/catalog/services"))[1].strip() == b"{}"
        assert _try(denying, region, "", Deed("GET", "/v1/health/connect/chat"))[1].strip() == b"[]"
        assert _try(denying, region, "", Deed("GET", "/v1/agent/self"))[0] == REFUSED
    denying.delete(SECOND, CANARY)
    denying.applied(0.0)


@pytest.mark.parametrize("role", MAY)
def test_a_role_does_its_own_work_and_no_other_in_any_region(denying: MeshWorld, role: str) -> None:
    for region in denying.names:
        done = set()
        for name, deed in DEEDS.items():
            code, body = _try(denying, region, _token(denying, role), deed)
            if name == "write intention" and code == 200:
                where = f"/v1/connect/intentions/{json.loads(body)['ID']}"
                assert _try(denying, region, _token(denying, role), Deed("DELETE", where))[0] == 200
            if code not in (REFUSED, 404):
                assert code == 200, (name, code, body)
            if code != REFUSED:  # 404: an absent key, which a role without the right is not told
                done.add(name)
        assert done == MAY[role], region


def test_traffic_flows_and_one_key_reaches_the_other_region(denying: MeshWorld) -> None:
    assert not failures(denying.load(60, 2))
    assert denying.consul_cli(SECOND, "kv", "put", CANARY, "0.5").code == 0
    denying.applied(0.5)
    assert denying.get(FIRST, CANARY) == "0.5"
    samples = denying.load(80, 4)
    assert not failures(samples)
    assert {s.region for s in samples} == set(denying.names)
    assert stage_share(samples, "canary") == pytest.approx(0.5, abs=0.12)
    denying.delete(FIRST, CANARY)
    denying.applied(0.0)


def test_the_commands_find_their_tokens(denying: MeshWorld) -> None:
    body = denying.weir("status", "--json").json
    assert all(region["ready"] and region["error"] is None for region in body["regions"].values())
    assert all(d["applied"] for d in body["traffic"]["chat"]["per_region"].values())
    done = denying.weir("traffic", "set", "0.2", "--yes", "--json")
    assert (done.code, done.json["applied"]) == (0, True), done.err
    assert denying.weir("traffic", "history", "--json").json["changes"][0]["after"] == "0.2"
    assert denying.weir("traffic", "undo", "--yes").code == 0
    agent = denying.world.address(SECOND).consul_http
    shown = subprocess.run(
        [*weir_command(), "intentions", "list", "--json", "--consul", agent],
        cwd=REPO,
        env={**os.environ, "CONSUL_HTTP_TOKEN": denying.world.token},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert {(i["source"], i["destination"]) for i in json.loads(shown.stdout)["intentions"]} == {
        ("ingress-gateway", "chat"),
        ("*", "*"),
    }


def test_a_drill_runs_with_its_own_role_and_leaves_its_history_everywhere(denying: MeshWorld) -> None:
    short = ("--set", "rate=40", "--set", "load=3", "--set", "settle=3", "--duration", "3")
    done = denying.weir("drill", "run", "control-plane-loss", "--yes", "--json", *short, timeout_s=200)
    # The share of so few requests is chance, so the verdict may be any; what needs rights must not fail.
    assert done.code in (0, 1, 3), done.err
    assert (done.json["healed"], done.json["failed"]) == (True, 0)
    assert done.json["requests"] > 100
    assert "was not written" not in done.err
    for region in denying.names:
        code, body = denying.consul(region, "GET", "/v1/kv/drills/history/?keys")
        assert (code, len(json.loads(body))) == (200, 1)


def test_processes_hold_their_own_tokens_and_show_none(denying: MeshWorld) -> None:
    """The management token is the supervisor's alone; nothing secret stands in an argument list."""
    secrets = {role: denying.world.token_of(role) for role in roles_for(("chat",))}
    secrets["management"] = denying.world.secrets.management
    found = strays.find(denying.folder)
    assert len(found) >= 2 * 9
    for stray in found:
        process = psutil.Process(stray.pid)
        words = " ".join(process.cmdline())
        assert not [role for role, secret in secrets.items() if secret in words], words
        env = process.environ()
        assert not [role for role, secret in secrets.items() if secret in env.values()]
        if stray.process == CONTROL_PLANE:
            assert env["CONSUL_HTTP_TOKEN_FILE"].endswith("/tokens/control-plane")
    for folder in denying.folder.glob("regions/*/consul/services"):
        kept = [json.loads(path.read_text()) for path in folder.iterdir()]
        owner = {row["Service"]["ID"]: row["Token"] for row in kept}
        assert secrets["management"] not in owner.values()
        assert owner[f"{folder.parents[1].name}-ingress"] == secrets["ingress"]
        assert owner["chat-stable-0-sidecar-proxy"] == secrets["instance-chat"]


def test_intentions_are_read_in_the_primary_with_the_control_planes_own_token(denying: MeshWorld) -> None:
    for region in denying.names:
        # A right that lacks is missing for ever; an agent that was slow to answer is forgiven.
        denying.until(f"no watch of {region} fails", lambda region=region: not _troubles(denying, region))
        assert ("intentions/" + FIRST in _watches(denying, region)) == (region != FIRST)


def _watches(world: MeshWorld, region: str) -> dict[str, Any]:
    where = world.world.address(region).control_plane_http + "/state"
    with urllib.request.urlopen(where, timeout=30) as answer:
        found: dict[str, Any] = json.load(answer)["watches"]
    return found


def _troubles(world: MeshWorld, region: str) -> list[str]:
    """Watches that end in an error, and those of intentions that have heard nothing yet."""
    rows = _watches(world, region).items()
    return [
        name for name, row in rows if row["error"] or (name.startswith("intentions") and not row["changes"])
    ]


def test_the_agents_have_nothing_to_complain_about_their_services_rights(denying: MeshWorld) -> None:
    for log in denying.folder.glob("regions/*/logs/consul.log"):
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        assert not [s for s in lines if "agent.proxycfg" in s and "Permission denied" in s]
        assert not [s for s in lines if "intention prefix denied" in s]
