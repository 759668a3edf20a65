"""The vLLM server as a child process: started, waited for, watched, stopped with everything it started.

Law: knows a command line and a URL, nothing of tokens. It isn't started again from here: a server that died
is told by `dead`, and what to do about it is for the hot pool. Nothing of it outlives this process
(leash.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from mesh.clock import Clock
from regions.cli.errors import WeirError
from services.faults import EngineFault
from services.upstream.client import Upstream

LEASH = Path(__file__).with_name("leash.py")
PROBE_S = 0.25
SAY_EVERY_S = 10.0
TAIL_LINES = 12
KILLED_WITHIN_S = 10.0
"""SIGKILL ends a process when the kernel comes round to it; gigabytes take their time to be given back."""


def free_port() -> int:
    """A port of loopback that nobody listens on now. Somebody may take it before the server does: then the
    server says so and start fails, which is all the same to a pool that starts again."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class ServerProcess:
    """One run of a server. dead: why it is gone although nobody stopped it, or empty."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], log: Path, clock: Clock) -> None:
        self._argv, self._env, self.log, self._clock = tuple(argv), env, log, clock
        self._process: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None
        self._stopping = False
        self._from = 0
        self.dead = ""

    @property
    def pid(self) -> int:
        """Of the leash; 0 when it doesn't run. The server and its children are below it."""
        return self._process.pid if self._process is not None and self._process.returncode is None else 0

    async def start(self, client: Upstream, within_s: float, say: Callable[[str], None]) -> None:
        """Start it and wait until /health is well. Raises WeirError with the end of its log; then, and when
        cancelled, nothing is left running."""
        try:
            await self._spawn()
            await self._healthy(client, within_s, say)
        except BaseException:
            await self.stop(0.0)
            raise

    async def _spawn(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._from = log.tell()
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", str(LEASH), *self._argv),
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, **self._env},
                process_group=0,
            )
        self._watch = asyncio.create_task(self._until_gone(self._process), name="vllm watch")

    async def _until_gone(self, process: asyncio.subprocess.Process) -> None:
        status = await process.wait()
        # The leash kills all below it before it ends, unless it was killed itself.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        if not self._stopping:
            self.dead = f"the vLLM server ended by itself (status {status}); see {self.log}"

    async def _healthy(self, client: Upstream, within_s: float, say: Callable[[str], None]) -> None:
        begun = self._clock.monotonic()
        said = begun
        while True:
            if self.dead:
                raise WeirError("vLLM", "ended while it started:\n" + self.tail(), f"read {self.log}")
            with contextlib.suppress(EngineFault):
                await client.ask("GET", "/health")
                return
            now = self._clock.monotonic()
            if now - begun > within_s:
                raise WeirError(
                    "vLLM",
                    f"not healthy after {within_s:g} s:\n{self.tail()}",
                    f"read {self.log}, or wait longer with --option start_s=SECONDS",
                )
            if now - said >= SAY_EVERY_S:
                said = now
                say(f"vLLM is starting ({now - begun:.0f} s): {self.tail(1)[:120]}")
            await self._clock.sleep(PROBE_S)

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, SIGKILL after the grace, and nothing is left. Fine to call twice, started or not."""
        self._stopping = True
        process = self._process
        if process is None:
            return
        if process.returncode is None and grace_s > 0:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            await asyncio.wait((self._gone(),), timeout=grace_s)
        if process.stdin is not None:
            # The end of this pipe is what the leash kills on.
            process.stdin.close()
        done, _ = await asyncio.wait((self._gone(),), timeout=KILLED_WITHIN_S)
        if not done:
            raise WeirError("vLLM", f"process {process.pid} can't be killed", "look at it with ps")

    def _gone(self) -> asyncio.Task[None]:
        assert self._watch is not None, "made with the process"
        return self._watch

    def tail(self, lines: int = TAIL_LINES) -> str:
        """The end of what this run wrote to its log."""
        try:
            with self.log.open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(max(self._from, size - 16_384))
                text = log.read().decode("utf-8", "replace")
        except OSError as error:
            return f"(its log can't be read: {error})"
        return "\n".join([line for line in text.splitlines() if line.strip()][-lines:])
