"""The drill's doors on the real kernel: packets are really dropped, processes really frozen and killed."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from drills.doors import Doors
from drills.faults.base import FaultSpec
from drills.faults.network import CutOffRegion
from drills.faults.region import FreezeRegion, KillRegion
from drills.live import LiveRegions
from drills.live_packets import LivePackets
from mesh.clock import SystemClock
from mesh.world.layout import MARKER
from mesh.world.world import World

pytestmark = pytest.mark.real

NAMES = ("a", "b", "c")
WORLD = 251
"""Outside the numbers that worlds use, so that no real world is touched."""


@dataclass(frozen=True)
class Address:
    consul: str


@dataclass(frozen=True)
class Stub:
    """What of a World the doors need. supervisors: pids by region."""

    folder: Path
    supervisors: dict[str, int]

    def address(self, region: str) -> Address:
        return Address(f"127.{WORLD}.{NAMES.index(region) + 1}.1")

    def supervisor(self, region: str) -> int | None:
        """As the real one: the lock of a dead supervisor is free, so it has no pid."""
        pid = self.supervisors.get(region)
        dead = pid is not None and psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        return None if dead else pid


class Ready(LiveRegions):
    """Real processes, but no supervisor to ask."""

    async def not_ready(self, region: str) -> str:
        return ""


def doors(stub: Stub) -> Doors:
    world = cast("World", stub)
    none = cast("Any", None)
    return Doors(Ready(world), none, LivePackets(world), none, none, SystemClock(), NAMES)


def reaches(source: str, target: tuple[str, int], within_s: float = 30.0) -> bool:
    with socket.socket() as connection:
        connection.settimeout(within_s)
        connection.bind((source, 0))
        try:
            connection.connect(target)
        except TimeoutError:
            return False
        return True


def test_a_region_is_cut_from_the_others_and_from_nobody_else(tmp_path: Path) -> None:
    found = doors(Stub(tmp_path, {}))
    if why := asyncio.run(found.packets.check()):
        pytest.skip(why)
    cut = CutOffRegion(FaultSpec("cut-off-region", "a", "chat", f"drill-{os.getpid()}"), found)
    with socket.create_server((f"127.{WORLD}.1.9", 0)) as listener:
        target = listener.getsockname()
        other, third, client = f"127.{WORLD}.2.1", f"127.{WORLD}.1.1", "127.0.0.1"
        assert reaches(other, target)
        try:
            asyncio.run(cut.inject())
            assert not reaches(other, target, within_s=0.5)
            assert reaches(third, target)
            assert reaches(client, target)
            assert not asyncio.run(cut.proof()).healed
        finally:
            asyncio.run(cut.heal())
        assert reaches(other, target)
    asyncio.run(cut.heal())
    assert asyncio.run(cut.proof()).healed
    assert cut.chain not in asyncio.run(found.packets.run("-S"))


@pytest.fixture
def region(tmp_path: Path) -> Iterator[Callable[[], tuple[Stub, list[int]]]]:
    """Starts three processes that carry the marks of region `a`."""
    started: list[subprocess.Popen[bytes]] = []

    def start() -> tuple[Stub, list[int]]:
        for name in ("supervisor", "consul", "ingress"):
            env = {**os.environ, MARKER: str(tmp_path), "WEIR_REGION": "a", "WEIR_PROCESS": name}
            code = "import signal; print(flush=True); signal.pause()"
            argv = ["setpriv", "--pdeathsig", "KILL", "--", sys.executable, "-c", code]
            process = subprocess.Popen(argv, env=env, stdout=subprocess.PIPE)
            assert process.stdout is not None
            process.stdout.readline()
            started.append(process)
        pids = [p.pid for p in started]
        return Stub(tmp_path, {"a": pids[0]}), pids

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


Start = Callable[[], tuple[Stub, list[int]]]


def test_a_frozen_region_stands_still_and_runs_again(region: Start) -> None:
    stub, pids = region()
    found = doors(stub)
    freeze = FreezeRegion(FaultSpec("freeze-region", "a", "chat", "d"), found)
    assert found.regions.pids("a")[0] == pids[0]
    assert found.regions.pids("b") == ()
    try:
        asyncio.run(freeze.inject())
        assert sorted(found.regions.frozen("a")) == sorted(pids)
        assert freeze.by_hand.startswith("kill -CONT ")
        assert not asyncio.run(freeze.proof()).healed
    finally:
        asyncio.run(freeze.heal())
    assert asyncio.run(freeze.proof()).healed
    assert found.regions.frozen("a") == ()


def test_a_region_that_is_slow_to_stand_still_is_waited_for() -> None:
    """A process that was told to stop runs on until it gets a processor to stop on."""

    class Slow:
        looks = 0

        def pids(self, _: str) -> tuple[int, ...]:
            return (1, 2)

        def signal(self, pids: tuple[int, ...], sign: signal.Signals) -> None:
            assert sign is signal.SIGSTOP

        def frozen(self, _: str) -> tuple[int, ...]:
            self.looks += 1
            return (1, 2) if self.looks > 2 else (1,)

    none = cast("Any", None)
    found = Doors(cast("Any", Slow()), none, none, none, none, SystemClock(), NAMES)
    told = asyncio.run(FreezeRegion(FaultSpec("freeze-region", "a", "chat", "d"), found).inject())
    assert told == "2 processes of a frozen"


def test_a_killed_region_is_gone(region: Start) -> None:
    stub, pids = region()
    found = doors(stub)
    told = asyncio.run(KillRegion(FaultSpec("kill-region", "a", "chat", "d"), found).inject())
    assert told == "3 processes of a killed"
    for pid in pids:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        assert ended.si_status == signal.SIGKILL
