"""The ADS server: grpc.aio around `stream.py`.

Law: shell, and small. Bytes in, core, bytes out; who may speak is decided by `authenticate` before
anything is sent. All methods belong to the loop that called `start`; `publish` never blocks and keeps only
the latest set.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from prometheus_client import CollectorRegistry

from mesh.clock import Clock
from mesh.model import Proxy
from mesh.xds import lrs, names
from mesh.xds.admission import Admission
from mesh.xds.auth import Authenticate, Denied, Why
from mesh.xds.bodies import Bodies
from mesh.xds.grpc_io import OPTIONS, first_message, prepare_socket
from mesh.xds.lrs import LoadSample
from mesh.xds.metrics import XdsMetrics
from mesh.xds.nack import Quarantine
from mesh.xds.resource_set import ResourceSet
from mesh.xds.session import Session, Shared
from mesh.xds.state import StreamState
from mesh.xds.stream import DeltaStream
from mesh.xds.wire import BadRequest, decode_request
from regions.cli.errors import WeirError

SERVICE = "envoy.service.discovery.v3.AggregatedDiscoveryService"

_STATUS = {
    Why.UNKNOWN: grpc.StatusCode.UNAVAILABLE,
    Why.TOKEN: grpc.StatusCode.UNAUTHENTICATED,
    Why.STOLEN: grpc.StatusCode.PERMISSION_DENIED,
}


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one server. first_within_s: for the first request of a stream; stop_s: grace at the end."""

    streams: int = 5_000
    streams_per_proxy: int = 4
    first_within_s: float = 10.0
    stop_s: float = 1.0


@dataclass(frozen=True, slots=True)
class Tcp:
    """A TCP door beside the Unix socket. Keys travel here, so credentials (mTLS) are not optional."""

    address: str
    credentials: grpc.ServerCredentials


class AdsServer:
    """Delta ADS and LRS for the proxies of one region.

    on_change: called, at most once per turn of the loop, after ACK, NACK, connect or disconnect.
    on_load(proxy id, samples): called with each load report.
    """

    def __init__(
        self,
        unix_path: str | None,
        *,
        clock: Clock,
        rng: random.Random,
        authenticate: Authenticate,
        metrics: CollectorRegistry,
        tcp: Tcp | None = None,
        limits: Limits = Limits(),
    ) -> None:
        if unix_path is None and tcp is None:
            raise ValueError("an ADS server needs a Unix socket, a TCP address, or both")
        self._path = Path(unix_path) if unix_path is not None else None
        self._tcp, self._limits, self._authenticate = tcp, limits, authenticate
        self._metrics = XdsMetrics(metrics)
        self._clock = clock
        self._shared = Shared(clock, Bodies(), self._metrics, Admission(clock, rng), self._changed)
        self._metrics.waiting.set_function(lambda: self._shared.admission.waiting)
        self._sets: dict[str, ResourceSet] = {}
        self._sessions: dict[str, list[Session]] = {}
        self._quarantines: dict[str, Quarantine] = {}
        self._count = 0
        self._server: grpc.aio.Server | None = None
        self._announced: asyncio.Handle | None = None
        self.on_change: Callable[[], None] = lambda: None
        self.on_load: Callable[[str, list[LoadSample]], None] = lambda _proxy, _samples: None

    async def start(self) -> None:
        """Bind and serve. Raises WeirError when the socket or address is not to be had."""
        server = grpc.aio.server(options=OPTIONS)
        server.add_generic_rpc_handlers((self._ads_handler(), self._lrs_handler()))
        if self._path is not None:
            prepare_socket(self._path)
            _bind(str(self._path), lambda: server.add_insecure_port(f"unix:{self._path}"))
        if self._tcp is not None:
            address, credentials = self._tcp.address, self._tcp.credentials
            _bind(address, lambda: server.add_secure_port(address, credentials))
        await server.start()
        if self._path is not None:
            os.chmod(self._path, 0o600)
        self._server = server

    async def stop(self) -> None:
        """Close all streams, give the socket back. Envoys keep what they have."""
        if self._server is None:
            return
        for session in self._all():
            session.close(grpc.StatusCode.UNAVAILABLE, "the control plane stops")
        await self._server.stop(self._limits.stop_s)
        self._server = None
        if self._announced is not None:
            self._announced.cancel()
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def publish(self, sets: Mapping[str, ResourceSet]) -> None:
        """Replace the sets of these proxies; those not named keep theirs. Equal versions wake nobody."""
        for proxy_id, desired in sets.items():
            before = self._sets.get(proxy_id)
            if before is not None and before.version == desired.version:
                continue
            self._sets[proxy_id] = desired
            self._metrics.publishes.inc()
            for session in self._sessions.get(proxy_id, ()):
                session.publish(desired)

    def forget(self, proxy_ids: Iterable[str]) -> None:
        """Drop what is kept for proxies that are gone for good. Open streams keep what they have."""
        for proxy_id in proxy_ids:
            self._sets.pop(proxy_id, None)
            self._quarantines.pop(proxy_id, None)

    def proxies(self) -> Mapping[str, tuple[StreamState, ...]]:
        """State of every open stream, by proxy id."""
        offset = self._clock.time() - self._clock.monotonic()
        return {
            proxy_id: tuple(session.core.state(offset) for session in sessions)
            for proxy_id, sessions in self._sessions.items()
        }

    # --- gRPC ---

    def _ads_handler(self) -> grpc.GenericRpcHandler:
        methods: dict[str, Any] = {
            "DeltaAggregatedResources": grpc.stream_stream_rpc_method_handler(self._delta),
            "StreamAggregatedResources": grpc.stream_stream_rpc_method_handler(_no_sotw),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    def _lrs_handler(self) -> grpc.GenericRpcHandler:
        def on_load(proxy_id: str, samples: list[LoadSample]) -> None:
            self._metrics.load_reports.inc()
            self.on_load(proxy_id, samples)

        return lrs.handler(self._admit, on_load, self._limits.first_within_s)

    async def _delta(self, _requests: Any, context: Any) -> None:
        data = await first_message(context, self._limits.first_within_s)
        if data is grpc.aio.EOF:
            return
        try:
            first = decode_request(data)
        except BadRequest as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        proxy = await self._admit(context, first.node_id)
        if self._count >= self._limits.streams:
            self._metrics.refused.labels("too-many-streams").inc()
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{self._count} streams are open")
        quarantine = self._quarantines.setdefault(proxy.id, Quarantine())
        core = DeltaStream(proxy.id, self._clock.monotonic(), quarantine)
        session = Session(context, core, self._shared)
        self._enter(session)
        try:
            # By themselves: a close that cancels the first write would send them again with the status, gRPC
            # refuses that, and the client waits on a dead stream for ever.
            await context.send_initial_metadata(())
            close = await session.run(first)
        finally:
            self._leave(session)
        if close is not None:
            self._metrics.refused.labels(close.code.name.lower()).inc()
            await context.abort(close.code, close.reason)

    async def _admit(self, context: Any, node_id: str) -> Proxy:
        """The proxy that speaks, or the end of the call. Before this nothing of ours is sent."""
        token = dict(context.invocation_metadata()).get(names.TOKEN_METADATA, "")
        try:
            proxy = self._authenticate(node_id, token if isinstance(token, str) else "")
            if proxy is None:
                raise Denied(Why.TOKEN, f"node {node_id!r} is not admitted")
            if proxy.id != node_id:
                raise Denied(Why.STOLEN, f"this token does not belong to node {node_id!r}")
            return proxy
        except Denied as denied:
            self._metrics.auth_failures.labels(denied.why.value).inc()
            await context.abort(_STATUS[denied.why], str(denied))
            raise AssertionError("abort raises") from denied

    # --- sessions ---

    def _enter(self, session: Session) -> None:
        proxy_id = session.core.proxy_id
        mine = self._sessions.setdefault(proxy_id, [])
        mine.append(session)
        # Half-open streams of a proxy that came again, or a hot restart: a few are right, a heap is not.
        for old in mine[: -self._limits.streams_per_proxy]:
            old.close(grpc.StatusCode.UNAVAILABLE, "replaced by newer streams of the same proxy")
        self._count += 1
        self._metrics.streams.set(self._count)
        if proxy_id in self._sets:
            session.publish(self._sets[proxy_id])
        self._changed()

    def _leave(self, session: Session) -> None:
        mine = self._sessions[session.core.proxy_id]
        mine.remove(session)
        if not mine:
            del self._sessions[session.core.proxy_id]
        self._count -= 1
        self._metrics.streams.set(self._count)
        self._changed()

    def _all(self) -> list[Session]:
        return [session for sessions in self._sessions.values() for session in sessions]

    def _changed(self) -> None:
        """Tell the owner, once per turn of the loop however many streams changed in it."""
        if self._announced is None:
            self._announced = asyncio.get_running_loop().call_soon(self._announce)

    def _announce(self) -> None:
        self._announced = None
        self.on_change()


async def _no_sotw(_requests: Any, context: Any) -> None:
    await context.abort(
        grpc.StatusCode.UNIMPLEMENTED,
        "weir serves incremental ADS only: set `api_type: DELTA_GRPC` in ads_config",
    )


def _bind(what: str, bind: Callable[[], int]) -> None:
    try:
        bind()
    except RuntimeError as error:
        raise WeirError(what, f"cannot listen: {error}", "free the address, or choose another") from error
