"""The supervisor on small real processes: order, restarts, hold, release, end, and no orphans."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest

from mesh.clock import SystemClock
from mesh.consul.errors import Unreachable
from mesh.world import patience
from mesh.world.control import RegionControl, SupervisorGone
from mesh.world.plan import CONSUL, REGISTERED, Probe, ProbeKind, ProcessPlan, Stop
from mesh.world.process import State
from mesh.world.supervisor import Supervisor
from regions.cli.errors import WeirError

DEADLINE_S = 60.0


class Desk:
    """Fails `failures` times, then opens; tells whether the region is healthy."""

    def __init__(self, failures: int = 0) -> None:
        self.failures, self.opened, self.kept = failures, 0, 0

    async def open(self) -> None:
        if self.failures:
            self.failures -= 1
            raise Unreachable(0, "PUT /v1/agent/service/register", "refused")
        self.opened += 1

    async def keep(self) -> None:
        self.kept += 1

    async def healthy(self) -> bool:
        return True


def plan(name: str, *argv: str, after: tuple[str, ...] = (), stop: Stop = Stop.ENVOYS) -> ProcessPlan:
    """A process that lives for a minute unless told otherwise."""
    return ProcessPlan(
        name=name,
        argv=argv or ("sleep", "60"),
        ready=Probe(ProbeKind.HTTP, name),
        stop=stop,
        after=after,
        env={"WEIR_TEST": name},
        grace_s=1.0,
    )


class Sockets:
    def __init__(self, path: Path) -> None:
        self._path = path

    def control_socket(self, region: str) -> Path:
        return self._path


class PatientControl(RegionControl):
    """Who asks is in the supervisor's own process: where that stands still, nobody is gone."""

    def _ask(self, request: dict[str, Any], timeout_s: float = DEADLINE_S) -> dict[str, Any]:
        return super()._ask(request, DEADLINE_S)


@asynccontextmanager
async def running(
    folder: Path,
    plans: list[ProcessPlan],
    desk: Desk,
    probe: Callable[[Probe], Awaitable[bool]] | None = None,
) -> AsyncIterator[tuple[RegionControl, list[bool]]]:
    """A supervisor and its control; shut down at the end, nothing left alive."""
    told: list[bool] = []

    async def yes(_: Probe) -> bool:
        return True

    supervisor = Supervisor(
        plans,
        lambda name: folder / f"{name}.log",
        probe or yes,
        desk,
        told.append,
        clock=SystemClock(),
        rng=Random(1),
    )
    socket, others = folder / "s.ctl", psutil.Process().children()
    task = asyncio.create_task(supervisor.run(socket))
    control = PatientControl(Sockets(socket), "r")
    try:
        await until(socket.exists)
        yield control, told
    finally:
        pids = [p.pid for p in psutil.Process().children() if p not in others]
        supervisor.shutdown()
        await asyncio.wait_for(task, DEADLINE_S)
        assert not [pid for pid in pids if psutil.pid_exists(pid)]
        assert not socket.exists()


async def until(condition: Callable[[], bool]) -> None:
    assert await asyncio.to_thread(patience.until, condition, DEADLINE_S)


CORE = [plan(CONSUL, stop=Stop.CONSUL), plan("gateway", after=(REGISTERED,))]


def test_a_region_becomes_ready_in_order(tmp_path: Path) -> None:
    passed: list[str] = []

    async def probe(question: Probe) -> bool:
        passed.append(question.url)
        return True

    async def go() -> None:
        desk = Desk(failures=2)
        async with running(tmp_path, CORE, desk, probe) as (control, told):
            await until(lambda: control.region().ready)
            assert passed == [CONSUL, "gateway"]
            assert desk.opened == 1
            assert told == [True]
            await until(lambda: desk.kept > 0)

    asyncio.run(go())


def test_nothing_leans_on_what_is_not_ready(tmp_path: Path) -> None:
    async def probe(question: Probe) -> bool:
        return question.url != CONSUL

    async def go() -> None:
        async with running(tmp_path, CORE, Desk(), probe) as (control, told):
            await until(lambda: control.status()[CONSUL].state is State.STARTING)
            rows = await asyncio.to_thread(control.status)
            assert {name: row.state for name, row in rows.items()} == {
                CONSUL: State.STARTING,
                "gateway": State.WAITING,
            }
            assert told == []

    asyncio.run(go())


def test_what_dies_comes_back(tmp_path: Path) -> None:
    async def go() -> None:
        async with running(tmp_path, CORE, Desk()) as (control, told):
            await until(lambda: control.region().ready)
            first = (await asyncio.to_thread(control.status))["gateway"]
            assert first.pid is not None
            os.kill(first.pid, signal.SIGKILL)
            await until(lambda: control.status()["gateway"].restarts == 1)
            await until(lambda: control.region().ready)
            again = (await asyncio.to_thread(control.status))["gateway"]
            assert again.pid != first.pid
            assert again.last_exit == -signal.SIGKILL
            assert told[-1]

    asyncio.run(go())


@pytest.mark.parametrize("sign", ["TERM", "KILL"])
def test_held_stays_down_until_released(tmp_path: Path, sign: str) -> None:
    async def go() -> None:
        async with running(tmp_path, CORE, Desk()) as (control, _):
            await until(lambda: control.region().ready)
            pid = (await asyncio.to_thread(control.status))["gateway"].pid
            assert pid is not None
            held = await asyncio.to_thread(control.hold, "gateway", sign)
            assert held.processes["gateway"].state is State.HELD
            assert not psutil.pid_exists(pid)
            await asyncio.to_thread(control.release, "gateway")
            await until(lambda: control.region().ready)

    asyncio.run(go())


def test_a_frozen_process_that_ignores_sigterm_is_stopped(tmp_path: Path) -> None:
    stubborn = plan("stubborn", "sh", "-c", "trap '' TERM; while :; do sleep 1; done")

    async def go() -> None:
        async with running(tmp_path, [*CORE, stubborn], Desk()) as (control, _):
            await until(lambda: control.region().ready)
            pid = (await asyncio.to_thread(control.status))["stubborn"].pid
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
            await asyncio.to_thread(control.hold, "stubborn")
            assert not psutil.pid_exists(pid)

    asyncio.run(go())


def test_what_cannot_start_says_why(tmp_path: Path) -> None:
    async def go() -> None:
        crash = plan("crash", "sh", "-c", "echo no luck; exit 3")
        async with running(tmp_path, [*CORE, crash], Desk()) as (control, _):
            await until(lambda: control.status()["crash"].restarts >= 2)
            assert (await asyncio.to_thread(control.status))["crash"].last_exit == 3
            assert "no luck" in (tmp_path / "crash.log").read_text()

    asyncio.run(go())


def test_requests_that_make_no_sense(tmp_path: Path) -> None:
    async def go() -> None:
        async with running(tmp_path, CORE, Desk()) as (control, _):
            for ask in (lambda: control.hold("nobody"), lambda: control.hold(CONSUL, "NOSUCH")):
                with pytest.raises(WeirError, match=r"no process|unknown signal"):
                    await asyncio.to_thread(ask)
            assert (tmp_path / "s.ctl").stat().st_mode & 0o077 == 0

    asyncio.run(go())


def test_nobody_answers_on_a_dead_socket(tmp_path: Path) -> None:
    with pytest.raises(SupervisorGone):
        RegionControl(Sockets(tmp_path / "none.ctl"), "r").status()


ORPHANS = """
import asyncio, sys
from pathlib import Path
from tests.unit.test_world_supervisor import CORE, Desk, running, until

async def main():
    async with running(Path(sys.argv[1]), CORE, Desk()) as (control, _):
        await until(lambda: control.region().ready)
        rows = await asyncio.to_thread(control.status)
        print(*(row.pid for row in rows.values()), flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture
def supervisor_process(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", sys.executable, "-c", ORPHANS, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_killing_the_supervisor_kills_its_children(supervisor_process: subprocess.Popen[str]) -> None:
    assert supervisor_process.stdout is not None
    pids = [int(word) for word in supervisor_process.stdout.readline().split()]
    assert len(pids) == len(CORE)
    assert all(map(psutil.pid_exists, pids))
    # Ready at once here: perhaps before setpriv, as which they begin, has told the kernel with whom to die.
    assert patience.until(lambda: {psutil.Process(pid).name() for pid in pids} == {"sleep"}, DEADLINE_S)
    supervisor_process.kill()
    assert patience.until(lambda: not any(map(psutil.pid_exists, pids)), DEADLINE_S)
