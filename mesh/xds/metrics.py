"""Metrics of the ADS and LRS servers.

Law: shell, no decisions. Everything lives in the registry that the caller hands in; nothing global.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from mesh.xds.stream import Answer, Heard
from mesh.xds.wire import Push

_ACK_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 15.0, 30.0)


class XdsMetrics:
    """One instance per server."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"weir_xds_{name}", text, labels, registry=registry)

        self.streams = Gauge("weir_xds_streams", "ADS streams that are open and known.", registry=registry)
        self.waiting = Gauge(
            "weir_xds_admission_waiting", "Streams waiting for their first answer.", registry=registry
        )
        self.push_to_ack = Histogram(
            "weir_xds_push_to_ack_seconds", "From push to ACK.", buckets=_ACK_BUCKETS, registry=registry
        )
        self.pushes = counter("pushes", "Responses sent.", "type")
        self.acks = counter("acks", "Responses accepted.", "type")
        self.nacks = counter("nacks", "Responses rejected.", "type")
        self.stale = counter("stale_nonces", "Requests that answered no outstanding push.", "type")
        self.sent_bytes = counter("sent_bytes", "Bytes of responses, before framing.")
        self.auth_failures = counter("auth_failures", "Streams refused.", "reason")
        self.refused = counter(
            "refused_streams", "Streams refused or closed by us for another reason.", "reason"
        )
        self.publishes = counter("publishes", "Resource sets handed in that differed from the one before.")
        self.load_reports = counter("load_reports", "LRS reports received.")

    def answered(self, answer: Answer) -> None:
        """Count what a request meant."""
        kind = short(answer.type_url)
        if answer.kind is Heard.ACK:
            self.acks.labels(kind).inc()
            self.push_to_ack.observe(answer.seconds)
        elif answer.kind is Heard.NACK:
            self.nacks.labels(kind).inc()
        elif answer.kind is Heard.STALE:
            self.stale.labels(kind).inc()

    def pushed(self, push: Push, size: int) -> None:
        """Count one response of `size` bytes."""
        self.pushes.labels(short(push.type_url)).inc()
        self.sent_bytes.inc(size)


_SHORT = {"Cluster", "ClusterLoadAssignment", "Listener", "RouteConfiguration", "Secret"}


def short(type_url: str) -> str:
    """Label of a type; clients choose type URLs, so what we do not serve shares one label."""
    name = type_url.rsplit(".", 1)[-1]
    return name if name in _SHORT else "other"
