"""Executors that sleep and wake on a real Consul agent: told first, never critical, never forgotten."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from regions.cli.errors import WeirError
from services.pool import hand
from services.pool.cli import app
from tests.contract.consul_agent import Agent, consul_agent
from tests.contract.executor_process import Executor, executor, until
from tests.sse import events

pytestmark = pytest.mark.real
ADMIN = 9001
SIDECAR = "-sidecar-proxy"


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    with consul_agent(tmp_path_factory.mktemp("consul"), "127.107.5.1", "us-east-1") as running:
        yield running


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is there answers here, however slow the machine; who isn't refuses the connection at once."""
    monkeypatch.setattr(hand, "ANSWER_S", 60.0)
    monkeypatch.setattr(hand, "STATE_S", 60.0)


def on(agent: Agent, folder: Path, ip: str, *options: str) -> AbstractContextManager[Executor]:
    flags = ("--consul", agent.http, "--sidecar", f"{ip}:21000", "--xds-token-sha256", "ab" * 32)
    return executor(folder, ip, *flags, "--admin", f"{ip}:{ADMIN}", "--run-dir", str(folder), *options)


def verb(it: Executor, path: str, method: str = "POST") -> tuple[int, Any]:
    return it.ask(method, path, port=ADMIN)


def meta(agent: Agent, id_: str) -> dict[str, str]:
    held: dict[str, Any] = agent.call("GET", "/v1/agent/services")
    found: dict[str, str] = (held.get(id_) or {}).get("Meta") or {}
    return found


def in_catalog(agent: Agent, id_: str) -> str:
    """What who asks Consul's servers is told of its lifecycle."""
    [row] = [r for r in agent.call("GET", "/v1/health/service/chat") if r["Service"]["ID"] == id_]
    return str(row["Service"]["Meta"]["lifecycle"])


def checks(agent: Agent, id_: str) -> set[str]:
    found = agent.call("GET", "/v1/agent/checks").values()
    return {check["Status"] for check in found if check["ServiceID"] in (id_, id_ + SIDECAR)}


def test_a_sleeper_is_known_passing_and_told_as_such_before_its_engine_sleeps(
    tmp_path: Path, agent: Agent
) -> None:
    with on(agent, tmp_path, "127.107.5.10", "--token-cost-ms", "20", "--drain-deadline-s", "600") as it:
        id_ = "chat-stable-0"
        until("ready", lambda: meta(agent, id_).get("lifecycle") == "ready")
        stream = it.stream(max_tokens=20)
        # The drain lasts until this client leaves, however late Consul is looked at.
        holds = it.stream(max_tokens=30_000)
        for one in (holds, stream):
            one.take(2)
        with ExitStack() as stack:
            asleep = stack.enter_context(_asked(it.ip, "/sleep"))
            until("told", lambda: meta(agent, id_ + SIDECAR).get("lifecycle") == "draining")
            said = events(stream.rest())
            assert (len(said), said[-1]) == (21, "[DONE]"), "sleeping drains first"
            assert it.running() == 1.0, "told while a stream was under way"
            assert meta(agent, id_)["lifecycle"] == "draining", "and it waits for the last one"
            holds.close()
            out, _ = asleep.communicate(timeout=60)
            body = json.loads(out)
        assert (body["lifecycle"], body["outcome"]["ok"]) == ("asleep", True)
        for name in (id_, id_ + SIDECAR):
            seen = meta(agent, name)
            assert seen["lifecycle"] == "asleep"
            assert abs(int(seen["slept_at"]) - time.time()) < 60
            assert (seen["device"], seen["admin"]) == ("cpu", f"127.107.5.10:{ADMIN}")
        assert (it.get("/health"), it.get("/ready")) == (200, 503)
        _several_checks_pass(agent, id_)
        assert (tmp_path / f"{id_}.snapshot").stat().st_size == body["snapshot_bytes"]
        code, body = verb(it, "/wake")
        assert (code, body["lifecycle"]) == (200, "running")
        seen = meta(agent, id_)
        assert (seen["lifecycle"], "slept_at" in seen) == ("ready", False)
        assert it.ask("POST", "/v1/completions", {"prompt": "x", "max_tokens": 2})[0] == 200
        verb(it, "/sleep")
        it.signal(signal.SIGTERM)
        assert it.ended() == 0, "one that sleeps ends as any other"
        # It has asked for that; an agent that stands still meanwhile does it when it goes on.
        until("gone", lambda: not meta(agent, id_))


def _asked(ip: str, path: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        ["curl", "-s", "-X", "POST", f"http://{ip}:{ADMIN}{path}"], stdout=subprocess.PIPE
    )


def _several_checks_pass(agent: Agent, id_: str) -> None:
    """The agent asks /health once a second, and two failures in a row would turn it critical. One that a busy
    machine kept from asking in time says so itself; what counts is what the sleeper answers."""
    until("passing", lambda: checks(agent, id_) == {"passing"})
    end = time.monotonic() + 3.5
    until("three checks later", lambda: _well_until(agent, id_, end))
    until("passing still", lambda: checks(agent, id_) == {"passing"})


def _well_until(agent: Agent, id_: str, end: float) -> bool:
    said = agent.call("GET", "/v1/agent/checks")[f"{id_}:http"]["Output"]
    assert not said or any(word in said for word in (" 200 OK", "Client.Timeout", "deadline exceeded")), said
    return time.monotonic() > end


def test_a_sleeper_that_is_killed_turns_critical_and_its_successor_is_ready(
    tmp_path: Path, agent: Agent
) -> None:
    id_ = "chat-stable-0"
    with on(agent, tmp_path, "127.107.5.11") as it:
        assert verb(it, "/sleep")[0] == 200
        it.signal(signal.SIGKILL)
        it.ended()
        until("noticed", lambda: "critical" in checks(agent, id_))
        told = pool(agent, "status", "--json")
        assert [row["state"] for row in json.loads(told.stdout)["instances"]] == ["unreachable"]
    file = str(tmp_path / f"{id_}.snapshot")
    with on(agent, tmp_path, "127.107.5.12", "--from-snapshot", file) as it:
        assert verb(it, "/state", "GET")[1]["snapshot_bytes"] > 0, "it knows how it is to answer"
        until("ready again", lambda: meta(agent, id_).get("lifecycle") == "ready")
        assert "slept_at" not in meta(agent, id_)
        until("passing", lambda: checks(agent, id_) == {"passing"})
        it.signal(signal.SIGTERM)
        it.ended()


@dataclass(frozen=True, slots=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


def pool(agent: Agent | str, *words: str) -> Done:
    """`weir pool …` in this process: a dozen starts of the whole command would take half a minute."""
    where = agent if isinstance(agent, str) else agent.http
    done = CliRunner().invoke(app, [*words, "--consul", where])
    if isinstance(done.exception, WeirError):
        return Done(int(done.exception.exit_code), done.stdout, done.stderr + str(done.exception))
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return Done(done.exit_code, done.stdout, done.stderr)


def states(agent: Agent) -> list[str]:
    return [row["state"] for row in json.loads(pool(agent, "status", "--json").stdout)["instances"]]


def test_weir_pool_shows_sleeps_wakes_and_refuses(tmp_path: Path, agent: Agent) -> None:
    with ExitStack() as stack:
        for number in (1, 2):
            ip, name = f"127.107.5.2{number}", f"chat-stable-{number}"
            stack.enter_context(on(agent, tmp_path, ip, "--instance", name))
        until("both in the catalog", lambda: states(agent) == ["ready", "ready"])
        done = pool(agent, "sleep", "chat-stable-1")
        assert (done.returncode, done.stdout.split()) == (0, ["us-east-1/chat-stable-1", "asleep"])
        assert "fixed prompt" in done.stderr
        shown = pool(agent, "status")
        assert [line.split()[3] for line in shown.stdout.splitlines()[1:3]] == ["asleep", "ready"]
        # The agent answers before it has told the servers, and those write to a disk.
        until("the catalog has it", lambda: in_catalog(agent, "chat-stable-1") == "asleep")
        last = pool(agent, "sleep", "chat-stable-2")
        assert last.returncode == 4
        assert "last ready stable instance" in last.stderr
        assert meta(agent, "chat-stable-2")["lifecycle"] == "ready", "refused before anything was done"
        forced = pool(agent, "sleep", "chat-stable-2", "--force", "--json")
        [row] = json.loads(forced.stdout)["instances"]
        assert (forced.returncode, row["ok"], row["state"]) == (0, True, "asleep")
        mixed = pool(agent, "wake", "chat-stable-1", "us-east-1/chat-stable-2", "--device", "cpu")
        assert mixed.returncode == 0
        again = pool(agent, "wake", "chat-stable-1")
        assert (again.returncode, "running already" in again.stderr) == (0, True)
        pool(agent, "sleep", "chat-stable-1")
        twice = pool(agent, "sleep", "chat-stable-1")
        assert (twice.returncode, twice.stdout.split()) == (0, ["us-east-1/chat-stable-1", "asleep"])
        partly = pool(agent, "wake", "chat-stable-1", "chat-stable-2", "--device", "cpu", "--json")
        assert partly.returncode == 5
        assert [row["ok"] for row in json.loads(partly.stdout)["instances"]] == [True, False]
        assert pool(agent, "sleep", "nobody").returncode == 2
        assert pool(agent, "wake", "chat-stable-2", "--device", "GPU-7").returncode == 1


def test_a_silent_consul_is_told() -> None:
    done = pool("http://127.107.5.99:8500", "status", "--region", "r", "--json")
    assert done.returncode == 1
    assert "r" in json.loads(done.stdout)["silent"]
    asked = pool("http://127.107.5.99:8500", "sleep", "chat-stable-0", "--region", "r")
    assert (asked.returncode, "a Consul is silent" in asked.stderr) == (1, True)


@pytest.mark.parametrize(
    ("options", "why"),
    [(("wake_garbage=1",), "the fixed prompt got"), (("wake_fails=1",), "wake")],
)
def test_a_process_whose_engine_wakes_broken_serves_again_by_a_cold_start(
    tmp_path: Path, options: tuple[str, ...], why: str
) -> None:
    flags = [word for option in (*options, "die_after=6") for word in ("--option", option)]
    flags += ["--set", "pool.heal_first_s=0.1"]
    with executor(
        tmp_path, "127.107.5.30", "--engine", "sim", "--admin", f"127.107.5.30:{ADMIN}", *flags
    ) as it:
        ask = {"prompt": "how deep", "max_tokens": 5, "seed": 1}
        before = it.ask("POST", "/v1/completions", ask)[1]["choices"]
        assert verb(it, "/sleep")[0] == 200
        refused, body = it.ask("POST", "/v1/completions", ask)
        assert refused == 503, "another instance may do better"
        code, body = verb(it, "/wake")
        assert (code, body["lifecycle"], body["cold_starts"]) == (200, "running", 1)
        assert why in body["outcome"]["recovered"]
        assert it.ask("POST", "/v1/completions", ask)[1]["choices"] == before
        text = it.ask("GET", "/metrics")[1]
        assert "weir_pool_cold_starts_total 1.0" in text
        assert 'weir_pool_verbs_total{code="done",verb="wake"} 1.0' in text
        assert it.ask("POST", "/v1/completions", ask | {"max_tokens": 9})[0] == 503, "it dies"
        until("healed without Consul and by nobody", lambda: verb(it, "/state", "GET")[1]["cold_starts"] == 2)
        assert it.ask("POST", "/v1/completions", ask)[1]["choices"] == before


def test_a_process_whose_engine_keeps_its_memory_never_says_that_it_slept(tmp_path: Path) -> None:
    """On fake devices, so that it moves as on real ones: off the one that is busier than it may be."""
    ip = "127.107.5.31"
    flags = ("--option", "weights_bytes=1000000", "--option", "leak_bytes=900000", "--admin", f"{ip}:{ADMIN}")
    flags += ("--devices", "fake:7:3", "--set", "pool.busy=0.2")
    with executor(tmp_path, ip, "--engine", "sim", *flags) as it:
        code, body = verb(it, "/sleep")
        assert (code, body["outcome"]["code"], body["lifecycle"]) == (500, "sleep_failed", "cold")
        assert (it.get("/health"), it.get("/ready")) == (200, 503)
        busy = body["device"]
        code, body = verb(it, "/wake")
        assert (code, body["device"]["kind"], body["device"]["name"]) == (200, "fake", "Fake GPU")
        assert body["device"]["load"] < 0.2 < busy["load"]
        assert it.get("/ready") == 200
        assert "the engine runs on the CPU" in it.log.read_text()
