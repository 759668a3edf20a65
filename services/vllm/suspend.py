"""Sleep by the driver: vLLM's processes are suspended on their GPU, contexts, graphs and all, and resumed.

Law: the same verbs as sleep.py has, and measured as there; vLLM itself is asked nothing and knows of nothing.
All its processes go or none: one that refuses brings the others back. Not yet tried on a GPU.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from regions.cli.errors import WeirError
from services.devices.checkpoint import CheckpointFailed, Checkpoints, ProcessState, resume, suspend
from services.faults import WakeFailed
from services.vllm.memory import Level, tree
from services.vllm.sleep import MIB

LEVELS = (1,)
"""What is suspended lies in the host's memory: weights parked."""


class Suspender:
    """pids: of the server and all below it. freed: bytes that its last sleep gave back. least: share of what
    was held that must be among them."""

    def __init__(
        self,
        door: Checkpoints,
        pids: Callable[[], Iterable[int]],
        level: Callable[[], Awaitable[Level]],
        least: float,
    ) -> None:
        self._door, self._pids, self._level, self._least = door, pids, level, least
        self._down: list[int] = []
        self.freed = self._held = 0

    async def sleep(self, level: int) -> None:
        """Raises RuntimeError when it doesn't sleep or gives too little back."""
        before = await self._level()
        try:
            await asyncio.to_thread(self._suspend)
        except CheckpointFailed as error:
            raise RuntimeError(f"vLLM could not be suspended: {error.what}: {error.why}") from error
        self._held = before.held
        self.freed = _given(before, await self._level())
        if self.freed < self._least * before.held:
            raise RuntimeError(
                f"vLLM is suspended and gave back {self.freed // MIB} MiB of {before.held // MIB}"
            )

    async def measure(self) -> Level:
        """As `level`; but of processes that are suspended the driver tells nothing, and who looks for them
        finds their neighbours' memory."""
        seen = await self._level()
        return Level(max(0, self._held - self.freed), seen.free) if self._down else seen

    def _suspend(self) -> None:
        found = [pid for pid in self._pids() if self._on_gpu(pid)]
        if not found:
            raise CheckpointFailed(0, "state", "no process of the server is on a GPU")
        for pid in found:
            try:
                suspend(self._door, pid)
            except CheckpointFailed:
                self._resume()
                raise
            self._down.append(pid)

    def _on_gpu(self, pid: int) -> bool:
        """The driver knows no state of a process without CUDA (the API server)."""
        try:
            return self._door.state(pid) is ProcessState.RUNNING
        except CheckpointFailed:
            return False

    async def wake(self, level: int) -> None:
        """Raises WakeFailed: before anything was touched when there is no room. What could not be resumed
        stays suspended, for the next try."""
        free = (await self._level()).free
        if self._down and free is not None and free < self.freed:
            raise WakeFailed(f"no room to wake: needs {self.freed // MIB} MiB and {free // MIB} are free")
        try:
            await asyncio.to_thread(self._resume)
        except CheckpointFailed as error:
            raise WakeFailed(f"vLLM could not be resumed: {error.what}: {error.why}") from error

    def _resume(self) -> None:
        while self._down:
            resume(self._door, self._down[-1])
            self._down.pop()


def _given(before: Level, after: Level) -> int:
    """Bytes that came free on the device, where that is known."""
    if before.free is None or after.free is None:
        return max(0, before.held - after.held)
    return max(0, after.free - before.free)


def chosen(sleep: str, offered: Callable[[], tuple[Checkpoints | None, str]]) -> Checkpoints | None:
    """The driver's door where the option `sleep` asks for it. Raises WeirError where there is none."""
    if sleep != "checkpoint":
        return None
    door, why = offered()
    if door is None:
        raise WeirError("engine option sleep=checkpoint", why, "leave it out for vLLM's own sleep mode")
    return door


def family(pid: int) -> list[int]:
    """The server's own pid and all below it."""
    return [process.pid for process in tree(pid)]
