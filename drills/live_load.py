"""The real generator: starts the load process, reads what it records, ends it.

Law: the child dies with us (PDEATHSIG) and is waited for. Reading never raises for a child that died: a
drill under way must go on to its healing; the record then shows the hole, and the judges say "unknown".
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO

from drills.history import Request
from drills.load_process import STARTED, LoadOrder
from drills.model import Load
from mesh.clock import Clock
from mesh.world.world import World
from regions.cli.errors import WeirError

START_S = 30.0
POLL_S = 0.05
SLACK_S = 5.0


class LiveGenerator:
    """drills.doors.Generator. Files go to `folder` (samples.jsonl, load.json, load.log)."""

    def __init__(self, world: World, folder: Path, clock: Clock, seed: int) -> None:
        self._world, self._folder, self._clock, self._seed = world, folder, clock, seed
        self._process: asyncio.subprocess.Process | None = None
        self._samples: IO[str] | None = None
        self._part = ""
        self._timeout_s = 0.0

    async def start(self, load: Load, service: str, ingresses: Sequence[str]) -> None:
        """Returns when the first request is about to go out. Raises WeirError when that doesn't come."""
        samples, order, log = (self._folder / n for n in ("samples.jsonl", "load.json", "load.log"))
        urls = {region: self._world.address(region).ingress_https for region in ingresses}
        body = asdict(load)
        del body["ingresses"]
        found = LoadOrder(
            out=str(samples),
            urls=urls,
            ca_file=str(self._world.ca_file),
            service=service,
            seed=self._seed,
            prefix=self._folder.name,
            **body,
        )
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            order.write_text(json.dumps(asdict(found)), encoding="utf-8")
            self._samples, self._timeout_s = samples.open("a+", encoding="utf-8"), load.timeout_s
        except OSError as error:
            raise WeirError(
                str(self._folder), error.strerror or "can't be written", "free disk space"
            ) from error
        command = (
            "setpriv",
            "--pdeathsig",
            "KILL",
            "--",
            sys.executable,
            "-m",
            "drills.load_process",
            str(order),
        )
        with log.open("wb") as errors:
            self._process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.DEVNULL, stdout=errors, stderr=errors, process_group=0
            )
        await self._started(log)

    async def _started(self, log: Path) -> None:
        assert self._process is not None
        deadline = self._clock.monotonic() + START_S
        while not (lines := self._lines()):
            if self._process.returncode is not None or self._clock.monotonic() > deadline:
                told = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["no reason"]
                raise WeirError("load generator", f"did not start: {told[-1]}", f"see {log}")
            await self._clock.sleep(POLL_S)
        assert json.loads(lines[0]) == STARTED

    async def take(self) -> Sequence[Request]:
        return [Request(**json.loads(line)) for line in self._lines()]

    def _lines(self) -> list[str]:
        """Whole lines that are new; the end of a line that is still being written is kept for later."""
        if self._samples is None:
            return []
        whole, _, self._part = (self._part + self._samples.read()).rpartition("\n")
        return whole.splitlines()

    async def stop(self) -> Sequence[Request]:
        process = self._process
        if process is None:
            return ()
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(self._timeout_s + SLACK_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
        rest = await self.take()
        if self._samples is not None:
            self._samples.close()
            self._samples = None
        return rest
