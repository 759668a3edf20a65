"""Registration on a real agent: what stands there, what a restart loses, how the dead and frozen leave."""

from __future__ import annotations

import json
import shutil
import signal
import urllib.error
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from services.devices.host import host_id
from tests.contract.consul_agent import Agent, consul_agent
from tests.contract.executor_process import Executor, executor, until
from tests.sse import events

pytestmark = pytest.mark.real
ID = "chat-stable-0"
SIDECAR = "chat-stable-0-sidecar-proxy"
DIGEST = "ab" * 32


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    with consul_agent(tmp_path_factory.mktemp("consul"), "127.107.2.1", "us-east-1") as running:
        yield running


def on(
    folder: Path, consul: str, ip: str, *options: str, token: str = ""
) -> AbstractContextManager[Executor]:
    flags = ("--consul", consul, "--sidecar", f"{ip}:21000", "--xds-token-sha256", DIGEST)
    env = {}
    if token:
        (folder / "token").write_text(token + "\n")
        env["CONSUL_HTTP_TOKEN_FILE"] = str(folder / "token")
    return executor(folder, ip, *flags, *options, env=env)


def held(agent: Agent, service_id: str = ID) -> dict[str, Any] | None:
    """What the agent has of a service."""
    try:
        body: dict[str, Any] = agent.call("GET", f"/v1/agent/service/{service_id}")
        return body
    except urllib.error.HTTPError as error:
        if error.code != 404:
            raise
        return None
    except OSError:
        return None


def gone(agent: Agent) -> bool:
    """Neither is there. An agent that stood still takes them off when it goes on: the executor has asked it
    to, and waits for a moment only."""
    return set(agent.call("GET", "/v1/agent/services")).isdisjoint({ID, SIDECAR})


def lifecycles(agent: Agent) -> set[str]:
    return {(held(agent, name) or {"Meta": {}})["Meta"].get("lifecycle", "") for name in (ID, SIDECAR)}


def health(agent: Agent) -> dict[str, set[str]]:
    """Check states in the catalog, of the instance and of its sidecar."""
    out: dict[str, set[str]] = {}
    for name, path in ((ID, "health/service/chat"), (SIDECAR, "health/connect/chat")):
        rows = agent.call("GET", f"/v1/{path}")
        [row] = [row for row in rows if row["Service"]["ID"] == name] or [{"Checks": []}]
        out[name] = {check["Status"] for check in row["Checks"] if check["ServiceID"] == name}
    return out


def is_health(agent: Agent, status: str) -> bool:
    return health(agent) == {ID: {status}, SIDECAR: {status}}


def test_what_stands_in_consul_is_the_contract(tmp_path: Path, agent: Agent) -> None:
    with on(tmp_path, agent.http, "127.107.2.10") as it:
        sidecar = until("registered", lambda: held(agent, SIDECAR))
        instance = held(agent)
        assert instance is not None
        meta = {"region": "us-east-1", "zone": "a", "stage": "stable", "version": "7", "model": "echo-1"}
        meta |= {"tenant_class": "", "lifecycle": "ready", "device": "cpu", "host": host_id()}
        assert (instance["Service"], instance["Address"], instance["Port"]) == ("chat", "127.107.2.10", 9000)
        assert instance["Meta"] == meta
        assert (sidecar["Kind"], sidecar["Service"]) == ("connect-proxy", "chat-sidecar-proxy")
        assert (sidecar["Address"], sidecar["Port"]) == ("127.107.2.10", 21000)
        assert sidecar["Meta"] == meta | {"xds_token_sha256": DIGEST, "weir_kind": "sidecar"}
        assert sidecar["Proxy"]["LocalServiceAddress"] == "127.107.2.10"
        until("passing", lambda: is_health(agent, "passing"))
        it.signal(signal.SIGTERM)
        assert it.ended() == 0
        until("gone", lambda: gone(agent))


def test_draining_is_told_first_and_the_stream_is_not_cut(tmp_path: Path, agent: Agent) -> None:
    slow = ("--token-cost-ms", "20", "--drain-deadline-s", "600")
    with on(tmp_path, agent.http, "127.107.2.11", *slow) as it:
        until("registered", lambda: held(agent, SIDECAR))
        stream = it.stream(max_tokens=50)
        # The drain lasts until this client leaves, however late the catalog is looked at.
        holds = it.stream(max_tokens=30_000)
        for one in (holds, stream):
            one.take(2)
        it.signal(signal.SIGTERM)
        until("draining is told", lambda: lifecycles(agent) == {"draining"})
        assert it.running() >= 1.0, "told while a stream was under way"
        assert it.get("/ready") == 503
        said = events(stream.rest())
        assert (len(said), said[-1]) == (51, "[DONE]")
        assert lifecycles(agent) == {"draining"}, "as long as anything is under way"
        holds.close()
        assert it.ended() == 0
        until("gone", lambda: gone(agent))


def test_killed_turns_critical_and_its_successor_passes_again(tmp_path: Path, agent: Agent) -> None:
    with on(tmp_path, agent.http, "127.107.2.12") as it:
        until("passing", lambda: is_health(agent, "passing"))
        it.signal(signal.SIGKILL)
        it.ended()
        until("critical", lambda: is_health(agent, "critical"))
    with on(tmp_path, agent.http, "127.107.2.13") as it:
        until("passing at its new address", lambda: is_health(agent, "passing"))
        assert (held(agent) or {})["Address"] == "127.107.2.13"
        it.signal(signal.SIGTERM)
        assert it.ended() == 0


def test_frozen_turns_critical_and_thawed_passes_again(tmp_path: Path, agent: Agent) -> None:
    with on(tmp_path, agent.http, "127.107.2.14") as it:
        until("passing", lambda: is_health(agent, "passing"))
        it.signal(signal.SIGSTOP)
        until("critical", lambda: is_health(agent, "critical"))
        it.signal(signal.SIGCONT)
        until("passing", lambda: is_health(agent, "passing"))
        it.signal(signal.SIGTERM)
        assert it.ended() == 0


def test_a_dead_engine_turns_critical(tmp_path: Path, agent: Agent) -> None:
    with on(tmp_path, agent.http, "127.107.2.15", "--option", "die_after=0") as it:
        until("passing", lambda: is_health(agent, "passing"))
        assert it.ask("POST", "/v1/completions", {"prompt": "hi"})[0] == 503
        until("critical", lambda: is_health(agent, "critical"))
        it.signal(signal.SIGTERM)
        assert it.ended() == 0


def test_what_was_deregistered_by_hand_comes_back(tmp_path: Path, agent: Agent) -> None:
    with on(tmp_path, agent.http, "127.107.2.16") as it:
        until("registered", lambda: held(agent, SIDECAR))
        for name in (SIDECAR, ID):
            agent.call("PUT", f"/v1/agent/service/deregister/{name}")
            until(f"{name} is back", lambda: held(agent) and held(agent, SIDECAR))
        it.signal(signal.SIGTERM)
        assert it.ended() == 0


def test_an_agent_that_lost_everything_is_told_again_while_requests_go_on(tmp_path: Path) -> None:
    """The executor starts before Consul, serves while it is away, and is in the catalog of the new one."""
    ip = "127.107.3.10"
    with on(tmp_path, "http://127.107.3.1:8500", ip, "--token-cost-ms", "20") as it:
        assert it.ask("POST", "/v1/completions", {"prompt": "hi", "max_tokens": 1})[0] == 200
        with consul_agent(tmp_path / "consul", "127.107.3.1", "us-east-1") as agent:
            until("registered", lambda: held(agent, SIDECAR))
            stream = it.stream(max_tokens=50)
            agent.kill()
            shutil.rmtree(tmp_path / "consul" / "data")
            assert it.ask("POST", "/v1/completions", {"prompt": "hi", "max_tokens": 1})[0] == 200
            agent.start()
            agent.wait_ready()
            until("registered anew", lambda: held(agent, SIDECAR))
            until("passing", lambda: is_health(agent, "passing"))
            assert events(stream.rest())[-1] == "[DONE]"
            agent.signal(signal.SIGSTOP)
            it.signal(signal.SIGTERM)
            assert it.ended() == 0, "a frozen agent does not hold the end up"
            agent.signal(signal.SIGCONT)


def test_with_acls_a_token_from_a_file_is_enough(tmp_path: Path) -> None:
    with consul_agent(tmp_path / "consul", "127.107.4.1", "us-east-1", acl=True) as agent:
        policy = Path("mesh/consul/policies/instance.hcl").read_text().replace("${service}", "chat")
        body = {"Name": "instance", "Rules": policy}
        agent.call("PUT", "/v1/acl/policy", _json(body))
        token = agent.call("PUT", "/v1/acl/token", _json({"Policies": [{"Name": "instance"}]}))["SecretID"]
        with on(tmp_path, agent.http, "127.107.4.10", token=token) as it:
            until("registered", lambda: held(agent, SIDECAR))
            agent.call("PUT", f"/v1/agent/service/deregister/{ID}")
            until("back", lambda: held(agent, SIDECAR))
            it.signal(signal.SIGTERM)
            assert it.ended() == 0
            until("gone", lambda: gone(agent))
            assert token not in it.log.read_text()
        with on(tmp_path, agent.http, "127.107.4.11") as it:
            until("the refusal is told", lambda: "403" in it.log.read_text())
            assert it.get("/health") == 200, "and it serves all the same"


def _json(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()
