"""One ADS stream on the wire: bytes between gRPC and the core.

Law: shell. Decides nothing: reads requests into a DeltaStream and writes what its `poll` says. Each stream
has its own writer that waits for its own client, so a slow one delays nobody and holds at most one push
per type.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc

from mesh.clock import Clock
from mesh.xds.admission import Admission
from mesh.xds.bodies import Bodies
from mesh.xds.metrics import XdsMetrics
from mesh.xds.resource_set import ResourceSet
from mesh.xds.stream import NEVER, DeltaStream, Heard
from mesh.xds.wire import BadRequest, Request, decode_request, with_nonce


@dataclass(frozen=True, slots=True)
class Shared:
    """What all sessions of a server have in common. `changed`: called after an ACK, a NACK or a push."""

    clock: Clock
    bodies: Bodies
    metrics: XdsMetrics
    admission: Admission
    changed: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Close:
    """How we end a stream."""

    code: grpc.StatusCode
    reason: str


class Session:
    """An authenticated stream. `run` returns when the client has gone, or says how to close."""

    def __init__(self, context: Any, core: DeltaStream, shared: Shared) -> None:
        self.core = core
        self._context, self._shared = context, shared
        self._wake = asyncio.Event()
        self._closing: asyncio.Future[Close] = asyncio.get_running_loop().create_future()
        self._timer: asyncio.TimerHandle | None = None

    def publish(self, desired: ResourceSet) -> None:
        """Hand the latest set to the core and wake the writer. Never blocks."""
        self.core.publish(desired)
        self._wake.set()

    def close(self, code: grpc.StatusCode, reason: str) -> None:
        """End the stream soon."""
        if not self._closing.done():
            self._closing.set_result(Close(code, reason))

    async def run(self, first: Request) -> Close | None:
        """Serve until the end. None: the client left."""
        tasks = (asyncio.create_task(self._read(first)), asyncio.create_task(self._write()))
        try:
            # The close is waited for on its own: the writer may hang on a client that does not read.
            await asyncio.wait((*tasks, self._closing), return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
            return self._closing.result() if self._closing.done() else None
        except BadRequest as error:
            return Close(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            if self._timer is not None:
                self._timer.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, first: Request) -> None:
        self._hear(first)
        while True:
            data = await self._context.read()
            if data is grpc.aio.EOF:
                return
            self._hear(decode_request(data))

    def _hear(self, request: Request) -> None:
        answer = self.core.request(request, self._shared.clock.monotonic())
        self._shared.metrics.answered(answer)
        if answer.kind in (Heard.ACK, Heard.NACK):
            self._shared.changed()
        if self.core.restless:
            self._wake.set()

    async def _write(self) -> None:
        async with self._shared.admission.turn():
            await self._flush()
        while True:
            await self._wake.wait()
            await self._flush()

    async def _flush(self) -> None:
        self._wake.clear()
        clock, metrics = self._shared.clock, self._shared.metrics
        for push in self.core.poll(clock.monotonic()):
            data = with_nonce(self._shared.bodies.of(push), push.nonce)
            metrics.pushed(push, len(data))
            await self._context.write(data)
        self._arm(clock.monotonic())

    def _arm(self, now: float) -> None:
        """Wake the writer when the core may have something to do by time alone."""
        verdict = self.core.verdict(now)
        if verdict is not None:
            self.close(grpc.StatusCode.UNAVAILABLE, verdict)
            return
        if self._timer is not None:
            self._timer.cancel()
        due = min(self.core.wake_at, self.core.judged_at)
        if due < NEVER:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, due - now) + 0.001, self._wake.set)
