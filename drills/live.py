"""The real doors: a local world's processes, its Consuls, its proxies.

Law: translates, decides nothing. Blocking calls (control sockets, process tables) leave the loop in
threads and are bounded in time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from random import Random
from typing import TypeVar

import psutil

from drills.doors import Doors, ProcessSeen
from drills.live_mesh import ROLE, LiveOrders, LiveStatuses
from drills.live_packets import LivePackets
from mesh.clock import Clock
from mesh.consul.client import Consul
from mesh.world import strays
from mesh.world.engines import ENGINES, slower_s
from mesh.world.process import State
from mesh.world.runner import weir_command
from mesh.world.world import World
from regions.cli.errors import WeirError

T = TypeVar("T")
ASK_S = 3.0
UP_S = 90.0


class LiveRegions:
    """drills.doors.Regions over the kernel's process table and the supervisors."""

    def __init__(self, world: World) -> None:
        self._world = world

    def pids(self, region: str) -> tuple[int, ...]:
        supervisor = self._world.supervisor(region)
        first = (supervisor,) if supervisor else ()
        return first + tuple(s.pid for s in strays.find(self._world.folder, region) if s.pid != supervisor)

    def signal(self, pids: Sequence[int], sign: signal.Signals) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, sign)

    def frozen(self, region: str) -> tuple[int, ...]:
        return tuple(pid for pid in self.pids(region) if _stopped(pid))

    async def up(self, region: str) -> None:
        # An engine that starts later than an echo has so much longer.
        later, ready_s = slower_s(self._world.spec.engine), ENGINES[self._world.spec.engine].ready_s
        argv = (*weir_command(), "region", "up", region, "--dir", str(self._world.folder))
        argv = (*argv, "--timeout", f"{ready_s:g}")
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            async with asyncio.timeout(UP_S + later):
                output, _ = await process.communicate()
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            raise
        if process.returncode:
            last = output.decode(errors="replace").strip()[-500:]
            raise WeirError(f"region {region}", f"could not be started: {last}", " ".join(argv))

    async def not_ready(self, region: str) -> str:
        # A frozen supervisor takes the connection and never answers: look before asking.
        if self._world.supervisor(region) is None:
            return "not running"
        if frozen := self.frozen(region):
            return f"{len(frozen)} of its processes are frozen"
        try:
            status = await _ask(self._world.control(region).region)
        except WeirError as error:
            return error.why
        waiting = [name for name, seen in status.processes.items() if seen.state is not State.READY]
        if waiting:
            return f"{waiting[0]} is {status.processes[waiting[0]].state.value}"
        return "" if status.ready else status.trouble or "not all instances pass their checks yet"


class LiveProcesses:
    """drills.doors.Processes over the supervisors' control sockets."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def status(self, region: str) -> Mapping[str, ProcessSeen]:
        found = await _ask(self._world.control(region).status)
        return {
            name: ProcessSeen(s.pid, s.state.value, s.state is State.READY, s.restarts)
            for name, s in found.items()
        }

    async def hold(self, region: str, process: str) -> None:
        await _ask(lambda: self._world.control(region).hold(process, "KILL"))

    async def release(self, region: str, process: str) -> None:
        await _ask(lambda: self._world.control(region).release(process))


async def _ask(question: Callable[[], T]) -> T:
    """A blocking question to a supervisor, in a thread, with an end."""
    try:
        async with asyncio.timeout(ASK_S):
            return await asyncio.to_thread(question)
    except TimeoutError as error:
        raise WeirError("supervisor", f"no answer within {ASK_S:g} s", "see `weir status`") from error


def _stopped(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.Error:
        return False


@asynccontextmanager
async def open_doors(world: World, service: str, clock: Clock, rng: Random) -> AsyncIterator[Doors]:
    """All doors of a running world; closed (clients, watches) at the end of the block."""
    async with AsyncExitStack() as stack:
        agents: dict[str, Consul] = {}
        for region in world.regions.names:
            address, token = world.address(region).consul_http, world.token_of(ROLE)
            client = Consul(address, token, clock=clock, rng=rng)
            agents[region] = await stack.enter_async_context(client)
        statuses = await stack.enter_async_context(LiveStatuses(world, agents, service, clock))
        yield Doors(
            regions=LiveRegions(world),
            processes=LiveProcesses(world),
            packets=LivePackets(world),
            orders=LiveOrders(world, agents),
            statuses=statuses,
            clock=clock,
            names=world.regions.names,
        )
