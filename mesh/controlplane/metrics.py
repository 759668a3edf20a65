"""Metrics of a control plane (Prometheus names `weir_…`, base units, labels from closed sets).

Law: definitions and one collector that looks at live objects when asked; no background work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_FAST = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


class PlaneMetrics:
    """What the plane itself counts. The ADS server adds its own to the same registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.tick_seconds = Histogram(
            "weir_tick_seconds", "From news to resources handed over", registry=registry, buckets=_FAST
        )
        self.refused = Counter(
            "weir_snapshots_refused", "Snapshots that contradicted themselves", registry=registry
        )
        self.applied_seconds = Histogram(
            "weir_change_applied_seconds",
            "From a change noticed in Consul to the last acknowledgement",
            registry=registry,
            buckets=_FAST,
        )
        self.status_failures = Counter(
            "weir_status_write_failures", "Status documents that Consul did not take", registry=registry
        )
        self.carried = Counter(
            "weir_carried", "Config keys claimed here or adopted from elsewhere", ["kind"], registry=registry
        )


Samples = Iterable[tuple[tuple[str, ...], float]]


class Views(Collector):
    """Gauges read from live objects at scrape time. views: name → (help, labels, function giving samples)."""

    def __init__(self, views: Mapping[str, tuple[str, tuple[str, ...], Callable[[], Samples]]]) -> None:
        self._views = views

    def collect(self) -> Iterable[Metric]:
        for name, (text, labels, samples) in self._views.items():
            family: Any = GaugeMetricFamily(name, text, labels=labels)
            for values, number in samples():
                family.add_metric(values, number)
            yield family
