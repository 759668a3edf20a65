"""The scripted Envoy on a real gRPC channel.

Law: shell around `FakeEnvoy`; each instance is one stream on a connection of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc

from mesh.xds import names
from mesh.xds.server import SERVICE
from tests.fakes.envoy import FakeEnvoy

DELTA = f"/{SERVICE}/DeltaAggregatedResources"


async def write(call: Any, data: bytes) -> None:
    """Raises AioRpcError when the server has ended the call, be it before we write or while we do: grpcio has
    InvalidStateError for the first, and which of the two it is, is chance."""
    try:
        await call.write(data)
    except asyncio.InvalidStateError:
        await call.read()  # raises how it ended
        raise


class GrpcEnvoy:
    """`pump` runs the protocol until the stream ends; the fake raises what the server does wrong."""

    def __init__(self, channel: grpc.aio.Channel, fake: FakeEnvoy, token: str) -> None:
        self.fake = fake
        metadata = ((names.TOKEN_METADATA, token),) if token else None
        self.call: Any = channel.stream_stream(DELTA)(metadata=metadata)
        self.deaf = asyncio.Event()
        self.deaf.set()

    async def pump(self) -> None:
        for data in self.fake.connect():
            await write(self.call, data)
        while (data := await self.call.read()) is not grpc.aio.EOF:
            await self.deaf.wait()
            for request in self.fake.receive(data):
                await write(self.call, request)


@asynccontextmanager
async def connected(
    target: str, fake: FakeEnvoy, token: str, credentials: grpc.ChannelCredentials | None = None
) -> AsyncIterator[GrpcEnvoy]:
    """A running fake; on exit a violation that it met is raised."""
    options = (("grpc.use_local_subchannel_pool", 1),)
    if credentials is None:
        channel = grpc.aio.insecure_channel(target, options=options)
    else:
        channel = grpc.aio.secure_channel(target, credentials, options=options)
    async with channel:
        envoy = GrpcEnvoy(channel, fake, token)
        task = asyncio.create_task(envoy.pump())
        try:
            yield envoy
        finally:
            if not task.done():
                envoy.call.cancel()
            with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
                await task


async def until(what: str, holds: Callable[[], bool], within_s: float = 60.0) -> None:
    """Poll until `holds`; AssertionError with `what` after the deadline."""
    loop = asyncio.get_running_loop()
    end = loop.time() + within_s
    while not holds():
        assert loop.time() < end, f"not within {within_s:g} s: {what}"
        await asyncio.sleep(0.005)
