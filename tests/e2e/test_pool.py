"""The hot pool in a world of three regions: instances sleep and wake while load flows, and nobody notices.

Law: on the shared world, through admin doors and `weir pool`; every instance is awake again at the end.
"""

from __future__ import annotations

import contextlib
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from mesh.world.addresses import EXECUTOR, EXECUTOR_ADMIN
from tests.e2e.breaking import critical, kill, mended, pid_of, process, under_load
from tests.e2e.mesh_world import MeshWorld

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

SECOND, NAME, NUMBER = "us-east-1", "chat-stable-0", 0


def door(world: MeshWorld, method: str, path: str) -> tuple[int, dict[str, Any]]:
    """The admin door of the instance, as an operator's curl."""
    host = world.world.address(SECOND).instance(NUMBER)
    request = urllib.request.Request(f"http://{host}:{EXECUTOR_ADMIN}{path}", method=method)
    with urllib.request.urlopen(request, timeout=60) as answer:
        body: dict[str, Any] = json.loads(answer.read())
        return answer.status, body


def state(world: MeshWorld) -> dict[str, Any]:
    """What the door says of the instance; empty while nobody is behind it: a killed one is started anew."""
    with contextlib.suppress(urllib.error.URLError, ConnectionError):
        return door(world, "GET", "/state")[1]
    return {}


def answered(world: MeshWorld) -> float:
    """How many requests the instance has answered, whatever came of them."""
    host = world.world.address(SECOND).instance(NUMBER)
    with urllib.request.urlopen(f"http://{host}:{EXECUTOR}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(x.split()[1]) for x in lines if x.startswith("weir_executor_requests_total{"))


def pooled(world: MeshWorld) -> dict[str, str]:
    """State by instance id, of the region, as `weir pool status` tells it."""
    done = world.weir("pool", "status", "--region", SECOND, "--json")
    assert done.code == 0, done.err
    return {row["instance"]: row["state"] for row in done.json["instances"]}


@contextlib.contextmanager
def awake_again(world: MeshWorld) -> Iterator[None]:
    try:
        yield
    finally:
        world.until("its door is open", lambda: bool(state(world)))
        if state(world).get("asleep"):
            door(world, "POST", "/wake")
        mended(world, SECOND)


def test_an_instance_sleeps_and_wakes_under_load_and_no_request_fails(calm: MeshWorld) -> None:
    with awake_again(calm), under_load(calm, 60) as load:
        calm.until("it has traffic", lambda: answered(calm) > 0)
        code, body = door(calm, "POST", "/sleep")
        assert (code, body["lifecycle"]) == (200, "asleep")
        before = answered(calm)
        load.lasts(3.0)
        assert answered(calm) == before, "no request reaches one that sleeps"
        assert pooled(calm)[NAME] == "asleep"
        # Of the others one may have been called ill for a moment on a busy machine.
        calm.until("a sleeper is not ill", lambda: critical(calm, SECOND) == set())
        assert calm.world.control(SECOND).region().ready, "and its region is whole"
        code, body = door(calm, "POST", "/wake")
        assert (code, body["lifecycle"], body["outcome"]["recovered"]) == (200, "running", "")
        calm.until("traffic comes back", lambda: answered(calm) > before)
        load.lasts(1.0)
    load.unharmed()


def test_the_last_ready_instance_of_a_region_is_not_put_to_sleep(calm: MeshWorld) -> None:
    with awake_again(calm):
        assert calm.weir("pool", "sleep", NAME).code == 2, "it stands in three regions"
        done = calm.weir("pool", "sleep", f"{SECOND}/{NAME}", f"{SECOND}/chat-stable-1", "--json")
        assert done.code == 5
        first, second = done.json["instances"]
        assert (first["ok"], second["ok"]) == (True, False)
        assert "last ready" in second["error"]
        with under_load(calm, 40) as load:
            load.lasts(1.0)
        load.unharmed()
        assert calm.weir("pool", "wake", NAME, "--region", SECOND).code == 0


def test_a_sleeper_that_is_killed_is_noticed_restarted_and_ready(calm: MeshWorld) -> None:
    with awake_again(calm), under_load(calm, 40) as load:
        assert door(calm, "POST", "/sleep")[0] == 200
        old = pid_of(calm, SECOND, NAME)
        calm.world.control(SECOND).hold(NAME, "KILL")
        try:
            calm.until("Consul notices", lambda: NAME in (critical(calm, SECOND) or ()))
            calm.until("the pool shows it", lambda: pooled(calm)[NAME] == "unreachable")
        finally:
            calm.world.control(SECOND).release(NAME)
        mended(calm, SECOND)
        assert process(calm, SECOND, NAME).pid != old
        assert pooled(calm)[NAME] == "ready"
        kill(calm, SECOND, NAME)
        mended(calm, SECOND)
        calm.until("ready once more", lambda: pooled(calm)[NAME] == "ready")
    load.unharmed()
