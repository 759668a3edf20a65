"""One region's supervisor: carries out the process plan, watches over it, answers on its control socket.

Law: decides nothing about traffic and knows no file but sockets and logs. When it dies, however it dies,
its children die with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any, Protocol

from mesh.clock import Clock
from mesh.consul.errors import ConsulError
from mesh.world import wire
from mesh.world.plan import CONSUL, REGISTERED, ProcessPlan, Stop
from mesh.world.process import Child, Prober, State

LOOK_EVERY_S = 0.1
KEEP_EVERY_S = 1.0
EVERY = "*"
"""In `hold` and `release`: all processes of the region."""


class RegistrationDesk(Protocol):
    """See mesh.world.desk.Desk."""

    async def open(self) -> None: ...
    async def keep(self) -> None: ...
    async def healthy(self) -> bool: ...


class Supervisor:
    """All processes of one region. `run` returns after `shutdown`.

    on_ready: called with True when the whole region became ready, with False when it no longer is.
    """

    def __init__(
        self,
        plans: Iterable[ProcessPlan],
        log: Callable[[str], Path],
        probe: Prober,
        desk: RegistrationDesk,
        on_ready: Callable[[bool], None],
        *,
        clock: Clock,
        rng: Random,
    ) -> None:
        self._children = {p.name: Child(p, log(p.name), probe, clock=clock, rng=rng) for p in plans}
        self._desk, self._on_ready, self._clock = desk, on_ready, clock
        self._registered = asyncio.Event()
        self._over = asyncio.Event()
        self._ready = False
        self._trouble = ""

    async def run(self, control_socket: Path) -> None:
        """Start everything and keep it running until `shutdown` was asked for. Stops all in any case."""
        server = await wire.serve(control_socket, self._handle)
        async with asyncio.TaskGroup() as tasks:
            work = [tasks.create_task(child.run(self._leans_on(child.plan))) for child in self._all]
            work += [tasks.create_task(self._register()), tasks.create_task(self._look())]
            try:
                await self._over.wait()
            finally:
                await self._stop_all()
                for task in work:
                    task.cancel()
        server.close()
        control_socket.unlink(missing_ok=True)

    @property
    def _all(self) -> list[Child]:
        return list(self._children.values())

    @property
    def _running(self) -> bool:
        return all(child.status.state is State.READY for child in self._all)

    def _leans_on(self, plan: ProcessPlan) -> tuple[asyncio.Event, ...]:
        return tuple(
            self._registered if name == REGISTERED else self._children[name].once_ready for name in plan.after
        )

    def shutdown(self) -> None:
        """Ask for the orderly end; returns at once."""
        self._over.set()

    async def _register(self) -> None:
        consul = self._children[CONSUL]
        while True:
            await consul.ready.wait()
            try:
                if self._registered.is_set():
                    await self._desk.keep()
                else:
                    await self._desk.open()
                    self._registered.set()
                self._trouble = ""
            except ConsulError as error:
                self._trouble = str(error)
            await self._clock.sleep(KEEP_EVERY_S if self._registered.is_set() else LOOK_EVERY_S)

    async def _look(self) -> None:
        """Tell `on_ready` when the region as a whole becomes ready or stops being so."""
        while True:
            # Instances may flap while a drill breaks them; ready means: it came up, and everything runs.
            ready = self._running and (self._ready or await self._desk.healthy())
            if ready != self._ready:
                self._ready = ready
                self._on_ready(ready)
            await self._clock.sleep(LOOK_EVERY_S)

    async def _stop_all(self) -> None:
        for stage in Stop:
            await asyncio.gather(*(c.stop() for c in self._all if c.plan.stop is stage))

    async def _handle(self, request: Mapping[str, Any]) -> dict[str, Any]:
        match request.get("op"):
            case "status":
                return self._status()
            case "hold":
                sign = _signal(str(request.get("signal", "TERM")))
                chosen = self._chosen(request)
                await asyncio.gather(*(child.hold(sign) for child in chosen))
                return self._status()
            case "release":
                for child in self._chosen(request):
                    child.release()
                return self._status()
            case "shutdown":
                self.shutdown()
                return {}
        raise wire.RequestError(f"unknown op {request.get('op')!r}")

    def _status(self) -> dict[str, Any]:
        processes = {name: asdict(child.status) for name, child in self._children.items()}
        # `_look` is a moment behind: right after a hold the region must not be called ready.
        ready = self._ready and self._running
        return {"ready": ready, "trouble": self._trouble, "processes": processes}

    def _chosen(self, request: Mapping[str, Any]) -> list[Child]:
        name = str(request.get("process", ""))
        if name == EVERY:
            return self._all
        if name not in self._children:
            raise wire.RequestError(f"no process {name!r}; there are {', '.join(self._children)}")
        return [self._children[name]]


def _signal(name: str) -> signal.Signals:
    with contextlib.suppress(KeyError):
        return signal.Signals[f"SIG{name.removeprefix('SIG')}"]
    raise wire.RequestError(f"unknown signal {name!r}")
