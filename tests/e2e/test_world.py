"""The local world on real Consul, Envoy, control planes and executors: up, faults around up, down.

Law: every world has its own folder and a number in 110..119, and is taken down in the fixture.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import subprocess
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mesh.world import patience, strays
from mesh.world.addresses import RegionAddresses
from mesh.world.runner import weir_command
from mesh.world.world import World

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]
REPO = Path(__file__).parents[2]
FIRST = "cn-north-1"


@dataclass(frozen=True)
class Cli:
    """`weir` with this world's folder."""

    folder: Path
    number: int

    def start(self, *args: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *weir_command(), *args, "--dir", str(self.folder)],
            cwd=REPO,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *args: str, rc: int = 0) -> tuple[str, str]:
        """stdout and stderr of a command that must end with `rc`."""
        process = self.start(*args)
        out, err = process.communicate(timeout=200)
        assert process.returncode == rc, err + out
        return out, err

    def up(self, *args: str, rc: int = 0) -> tuple[str, str]:
        return self.run("up", "--regions", FIRST, "--instances", "1", *args, rc=rc)

    def status(self) -> dict[str, Any]:
        body: dict[str, Any] = json.loads(self.run("status", "--json")[0])
        return body

    @property
    def pids(self) -> set[int]:
        return {s.pid for s in strays.find(self.folder)}


def ended(cli: Cli) -> bool:
    return not cli.pids


def _cli(folder: Path, number: int) -> Iterator[Cli]:
    cli = Cli(folder / ".weir", number)
    try:
        yield cli
    finally:
        strays.end(strays.find(cli.folder))
        if cli.folder.exists():
            cli.run("down", "--purge")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    """One region with one stable instance and a canary, up."""
    for cli in _cli(tmp_path_factory.mktemp("world"), 110):
        cli.up("--subnet", str(cli.number))
        yield cli


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Cli]:
    """A world not yet made."""
    yield from _cli(tmp_path, 111)


def fetch(cli: Cli, path: str) -> tuple[int, str]:
    """Status and colour of a request through the ingress."""
    world = World.load(cli.folder)
    context = ssl.create_default_context(cafile=str(world.ca_file))
    url = world.address(FIRST).ingress_https + path
    with urllib.request.urlopen(url, context=context, timeout=30) as answer:
        return answer.status, answer.headers["x-envoy-upstream-metadata"]


def test_status_and_a_request(world: Cli) -> None:
    body = world.status()
    region = body["regions"][FIRST]
    assert body["schema_version"] == 1
    assert region["ready"]
    assert region["services"]["chat"] == {
        "stable": {"instances": 1, "healthy": 1},
        "canary": {"instances": 1, "healthy": 1},
    }
    assert fetch(world, "/chat/health") == (200, f"region={FIRST};stage=stable")
    assert "yes" in world.run("status")[0]
    assert body["traffic"]["chat"]["regions"] == {FIRST: 1.0}


def test_up_again_changes_nothing(world: Cli) -> None:
    before = world.pids
    world.run("up")
    world.up()
    assert world.pids == before
    _, err = world.run("up", "--instances", "2", rc=4)
    assert "instances is 1, asked for 2" in err
    assert world.pids == before


def test_another_world_takes_another_number(world: Cli, other: Cli) -> None:
    _, err = other.up("--subnet", str(world.number), rc=1)
    assert f"127.{world.number}.1." in err
    assert "already taken by" in err
    assert "--subnet" in err
    assert ended(other)


def test_a_killed_supervisor_takes_its_region_along_and_up_brings_it_back(world: Cli) -> None:
    loaded = World.load(world.folder)
    supervisor = loaded.supervisor(FIRST)
    assert supervisor is not None
    os.kill(supervisor, signal.SIGKILL)
    assert patience.until(lambda: ended(world), 60)
    assert not world.status()["regions"][FIRST]["ready"]
    assert loaded.control_socket(FIRST).exists()  # what a crash leaves
    world.run("region", "up", FIRST)
    assert world.status()["regions"][FIRST]["ready"]
    assert fetch(world, "/chat/health")[0] == 200


def test_a_held_process_is_released_by_up(world: Cli) -> None:
    control = World.load(world.folder).control(FIRST)
    control.hold("control-plane", "KILL")
    assert not control.region().ready
    assert fetch(world, "/chat/health")[0] == 200
    world.run("up")
    assert control.region().ready


def test_a_region_goes_down_and_comes_back(world: Cli) -> None:
    facts = world.folder / "regions" / FIRST / "region.json"
    assert json.loads(facts.read_text())["ready"]
    for _ in range(2):
        world.run("region", "down", FIRST)
        assert ended(world)
        assert not facts.exists()
    out, _ = world.run("region", "up", FIRST, "--json")
    assert json.loads(out)["ingress"] == f"https://127.{world.number}.1.3:8443"
    assert json.loads(facts.read_text())["ready"]


def test_a_port_already_taken(other: Cli) -> None:
    at = RegionAddresses(other.number, 1).ingress
    with socket.create_server((at, 8443)):
        _, err = other.up("--subnet", str(other.number), rc=1)
    assert f"{at}:8443" in err
    assert f"process {os.getpid()}" in err
    assert ended(other)


def test_ctrl_c_during_up_takes_back_what_it_started(other: Cli) -> None:
    process = other.start("up", "--regions", FIRST, "--subnet", str(other.number))
    try:
        assert patience.until(lambda: any(s.process == "consul" for s in strays.find(other.folder)), 120)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, err
    assert "nothing of it is left" in err
    assert ended(other)


def test_a_secondary_asks_for_the_primary_first(other: Cli) -> None:
    _, err = other.run("region", "up", "us-east-1", rc=4)
    assert f"apply {FIRST} first" in err
    assert ended(other)


def test_what_is_missing_is_named(other: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("consul", "envoy"):
        with monkeypatch.context() as patch:
            patch.setenv(f"WEIR_{name.upper()}", "/nowhere")
            _, err = other.up(rc=1)
        assert f"WEIR_{name.upper()}" in err
    assert "no world here" in other.run("status", rc=1)[1]
    assert "no world here" in other.run("down", rc=1)[1]


def test_down_leaves_nothing_even_without_supervisors(world: Cli) -> None:
    """Runs last: it takes the module's world down, one part of it by a crash."""
    loaded = World.load(world.folder)
    supervisor = loaded.supervisor(FIRST)
    assert supervisor is not None
    os.kill(supervisor, signal.SIGSTOP)  # a supervisor that doesn't answer
    os.kill(supervisor, signal.SIGKILL)
    world.run("down")
    assert ended(world)
    assert not loaded.layout.runtime.exists()
    world.run("down", "--purge")
    assert not world.folder.exists()
