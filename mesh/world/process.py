"""One child process of a supervisor: started, probed, restarted with back-off, held down, stopped.

Law: knows one ProcessPlan and nothing of its siblings. Time and chance are handed in. A child never
outlives its supervisor: the kernel kills it with its parent (PDEATHSIG).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from random import Random

from mesh.clock import Clock
from mesh.world.plan import Probe, ProcessPlan

FIRST_DELAY_S, MAX_DELAY_S = 0.1, 5.0
HEALTHY_AFTER_S = 10.0
"""A process that lived this long starts its back-off anew."""
PROBE_EVERY_S = 0.05
MAX_LOG_BYTES = 16 * 2**20


class State(StrEnum):
    WAITING = "waiting"  # for what it leans on
    STARTING = "starting"  # runs, probe not yet passed
    READY = "ready"
    BACKOFF = "backoff"  # died, comes back in a moment
    HELD = "held"  # kept down on request
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """restarts: how often it was started again. last_exit: exit status of the last run, negative = signal.

    error: why it could not even be started, or empty.
    """

    state: State
    pid: int | None
    restarts: int
    last_exit: int | None
    error: str = ""


def delay_s(failures: int, rng: Random) -> float:
    """Seconds to wait after `failures` (>= 1) deaths in a row: doubling, with jitter, at most MAX_DELAY_S."""
    full = min(MAX_DELAY_S, FIRST_DELAY_S * 2.0 ** min(failures - 1, 30))
    return full * rng.uniform(0.5, 1.0)


Prober = Callable[[Probe], Awaitable[bool]]


class Child:
    """Runs a plan until `stop`. `once_ready` is set when it was ready for the first time and stays set."""

    def __init__(self, plan: ProcessPlan, log: Path, probe: Prober, *, clock: Clock, rng: Random) -> None:
        self.plan = plan
        self.once_ready = asyncio.Event()
        self.ready = asyncio.Event()
        self._log, self._probe, self._clock, self._rng = log, probe, clock, rng
        self._state, self._restarts, self._error = State.WAITING, 0, ""
        self._last_exit: int | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._wanted = asyncio.Event()
        self._wanted.set()
        self._down = asyncio.Event()
        self._down.set()
        self._stopping = False

    @property
    def status(self) -> ProcessStatus:
        pid = self._process.pid if self._process is not None else None
        return ProcessStatus(self._state, pid, self._restarts, self._last_exit, self._error)

    async def run(self, leans_on: tuple[asyncio.Event, ...]) -> None:
        """Start when everything it leans on was ready once; then keep it running. Returns after `stop`."""
        failures, starts = 0, 0
        for event in leans_on:
            await event.wait()
        while not self._stopping:
            if not self._wanted.is_set():
                self._state = State.HELD
                await self._wanted.wait()
                continue
            self._restarts = starts
            starts += 1
            began = self._clock.monotonic()
            await self._run_once()
            if self._stopping or not self._wanted.is_set():
                failures = 0
                continue
            failures = 1 if self._clock.monotonic() - began >= HEALTHY_AFTER_S else failures + 1
            self._state = State.BACKOFF
            await self._clock.sleep(delay_s(failures, self._rng))
        self._state = State.STOPPED

    async def _run_once(self) -> None:
        self._down.clear()
        try:
            self._process = await self._spawn()
            self._state, self._error = State.STARTING, ""
            if self._stopping or not self._wanted.is_set():
                self._signal(signal.SIGTERM)  # unwanted since the fork began
            prober = asyncio.create_task(self._become_ready(), name=f"probe {self.plan.name}")
            try:
                self._last_exit = await self._process.wait()
            finally:
                prober.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await prober
        except OSError as error:
            # No disk for the log, no memory for a fork: it may pass, so this is a failed start like others.
            self._error = str(error)
        finally:
            self.ready.clear()
            self._process = None
            self._down.set()

    async def _spawn(self) -> asyncio.subprocess.Process:
        _rotate(self._log)
        with self._log.open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *("setpriv", "--pdeathsig", "KILL", "--", *self.plan.argv),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self.plan.env},
                process_group=0,
            )

    async def _become_ready(self) -> None:
        while not await self._probe(self.plan.ready):
            await self._clock.sleep(PROBE_EVERY_S)
        self._state = State.READY
        self.ready.set()
        self.once_ready.set()

    async def hold(self, sign: signal.Signals = signal.SIGTERM) -> None:
        """Stop it with this signal and keep it down until `release`. Returns when it is down."""
        self._wanted.clear()
        await self._end(sign)
        if self._state is not State.WAITING:
            self._state = State.HELD

    def release(self) -> None:
        """Undo `hold`; it starts at once."""
        self._wanted.set()

    async def stop(self) -> None:
        """End it for good: SIGTERM, then SIGKILL after the plan's grace."""
        self._stopping = True
        self._wanted.set()
        await self._end(signal.SIGTERM)

    async def _end(self, sign: signal.Signals) -> None:
        self._signal(sign)
        if sign is not signal.SIGKILL:
            # A frozen process takes no SIGTERM before it runs again.
            self._signal(signal.SIGCONT)
            try:
                await asyncio.wait_for(self._down.wait(), self.plan.grace_s)
            except TimeoutError:
                self._signal(signal.SIGKILL)
        await self._down.wait()

    def _signal(self, sign: signal.Signals) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, sign)


def _rotate(log: Path) -> None:
    """Keep one old log, so that a world that is up for weeks doesn't fill the disk by restarts."""
    log.parent.mkdir(parents=True, exist_ok=True)
    if log.exists() and log.stat().st_size > MAX_LOG_BYTES:
        log.replace(log.with_suffix(".log.1"))
