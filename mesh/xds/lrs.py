"""Load reports of Envoy (LRS): a pure decoder and a thin stream around it.

Law: what Envoy sends is turned into LoadSamples and handed on; nothing is summed up or kept here. The
first report of a stream is authenticated as an ADS stream is, and nothing is taken from whoever is not a
proxy of ours.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
from envoy.service.load_stats.v3 import lrs_pb2

from mesh.model import Proxy
from mesh.xds.grpc_io import first_message
from mesh.xds.wire import BadRequest

SERVICE = "envoy.service.load_stats.v3.LoadReportingService"
INTERVAL_S = 1
"""Reporting interval asked of Envoy: the observed share is at most this old."""


@dataclass(frozen=True, slots=True)
class LoadSample:
    """What one Envoy sent to one (service, region, stage) since its last report.

    requests: issued in the interval; errors: answered with 5xx or not at all. region and stage are those
    of the endpoints that got the requests, so a failover shows as what it is. seconds: how long the interval
    was, as Envoy measured it.
    """

    service: str
    region: str
    stage: str
    requests: int
    errors: int
    seconds: float = 0.0


def decode_report(data: bytes) -> tuple[str, list[LoadSample]]:
    """(node id, samples) of a LoadStatsRequest. Raises BadRequest when the bytes are none.

    Clusters whose name is not `service.region.stage` are none of ours and left out; so are empty samples.
    """
    try:
        message = lrs_pb2.LoadStatsRequest.FromString(data)
    except Exception as error:  # upb raises DecodeError, of a module that differs between versions
        raise BadRequest(f"not a LoadStatsRequest: {error}") from error
    samples = []
    for stats in message.cluster_stats:
        parts = stats.cluster_name.rsplit(".", 2)
        if len(parts) != 3 or not all(parts):
            continue
        lasted = stats.load_report_interval
        seconds = lasted.seconds + lasted.nanos / 1e9
        for local in stats.upstream_locality_stats:
            requests, errors = local.total_issued_requests, local.total_error_requests
            if requests or errors:
                region, stage = local.locality.region or parts[1], local.locality.sub_zone or parts[2]
                samples.append(LoadSample(parts[0], region, stage, requests, errors, seconds))
    return message.node.id, samples


def response() -> bytes:
    """What Envoy is asked for: all clusters, each second, per locality."""
    message = lrs_pb2.LoadStatsResponse(send_all_clusters=True, report_endpoint_granularity=False)
    message.load_reporting_interval.FromSeconds(INTERVAL_S)
    return bytes(message.SerializeToString())


Admit = Callable[[Any, str], Awaitable[Proxy]]
"""(gRPC context, node id) → the proxy; aborts the call otherwise."""


def handler(
    admit: Admit, on_load: Callable[[str, list[LoadSample]], None], first_within_s: float
) -> grpc.GenericRpcHandler:
    """The gRPC service. Bytes in and out; `on_load` is called with each report that carries samples."""

    async def stream_load_stats(_requests: Any, context: Any) -> None:
        data = await first_message(context, first_within_s)
        proxy: Proxy | None = None
        while data is not grpc.aio.EOF:
            try:
                node_id, samples = decode_report(data)
            except BadRequest as error:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            if proxy is None:
                proxy = await admit(context, node_id)
                await context.write(response())
            if samples:
                on_load(proxy.id, samples)
            data = await context.read()

    method: Any = grpc.stream_stream_rpc_method_handler(stream_load_stats)
    return grpc.method_handlers_generic_handler(SERVICE, {"StreamLoadStats": method})
