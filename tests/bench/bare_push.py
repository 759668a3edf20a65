"""The floor of a weight change: a bare script pushes the same routes into the same kind of Envoy.

Law: no Consul, no protocol state, no control plane: whatever a client asks for is answered with all there is
of that type, and `push` writes one route table to the open stream.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
from envoy.service.discovery.v3 import discovery_pb2

from mesh.xds import names
from mesh.xds.grpc_io import OPTIONS
from mesh.xds.resource_set import Resource, ResourceSet
from mesh.xds.server import SERVICE


class BareAds:
    """Delta ADS for one client, on a Unix socket."""

    def __init__(self, path: Path, made: ResourceSet) -> None:
        self._path, self._made = path, made
        self._context: Any = None
        self._count = 0
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        self._server = grpc.aio.server(options=OPTIONS)
        method = grpc.stream_stream_rpc_method_handler(self._serve)
        handler = grpc.method_handlers_generic_handler(SERVICE, {"DeltaAggregatedResources": method})
        self._server.add_generic_rpc_handlers((handler,))
        self._server.add_insecure_port(f"unix:{self._path}")
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(0)

    async def push(self, route: Resource) -> None:
        """Send one route table."""
        await self._context.write(self._response(names.ROUTE, [route]))

    async def _serve(self, _requests: Any, context: Any) -> None:
        self._context = context
        asked: set[str] = set()
        while (data := await context.read()) is not grpc.aio.EOF:
            request = discovery_pb2.DeltaDiscoveryRequest.FromString(data)
            wanted = set(request.resource_names_subscribe)
            if not wanted and request.type_url in asked:
                continue  # an ACK
            asked.add(request.type_url)
            group = self._made.of(request.type_url)
            resources = [r for name, r in group.items() if not wanted or name in wanted]
            await context.write(self._response(request.type_url, resources))

    def _response(self, type_url: str, resources: list[Resource]) -> bytes:
        self._count += 1
        answer = discovery_pb2.DeltaDiscoveryResponse(type_url=type_url, nonce=str(self._count))
        for resource in resources:
            answer.resources.add().ParseFromString(resource.body)
        data: bytes = answer.SerializeToString()
        return data


PAUSE_S = 0.002
"""Between two questions. Without it prober, ingress, sidecar and executor take both cores of a small machine,
and what is measured is how long the others wait for one."""


class Prober:
    """Asks one thing after another over one connection, and wakes whoever waits for a stage to answer."""

    def __init__(self, http: Any, url: str) -> None:
        self._http, self._url = http, url
        self._wanted, self._seen = "", asyncio.Event()
        self.at = 0.0
        self.failed = 0

    async def run(self) -> None:
        """Until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            async with self._http.get(self._url) as answer:
                await answer.read()
                self.failed += answer.status != 200
                if self._wanted and f"stage={self._wanted}" in answer.headers.get(names.METADATA_HEADER, ""):
                    self.at, self._wanted = loop.time(), ""
                    self._seen.set()
            await asyncio.sleep(PAUSE_S)

    async def first(self, stage: str, deadline_s: float = 10.0) -> float:
        """Loop time of the first answer of `stage` from now on."""
        self._seen.clear()
        self._wanted = stage
        async with asyncio.timeout(deadline_s):
            await self._seen.wait()
        return self.at
