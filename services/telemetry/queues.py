"""What the schedulers inside an engine do, as metrics.

Law: reads BatchingCounts when it is asked; one row per scheduler, told apart by the label `role`.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from services.batching.model import WAIT_BUCKETS_S, BatchingCounts
from services.engine import Engine
from services.telemetry.inside import Batches, layers

LABELS = ("model_name", "engine", "region", "stage", "role")
COUNTERS = {
    "retries": "Requests put back after they failed before their first token",
    "deadline_misses": "Requests whose deadline passed in the queue or while they ran",
    "hangs": "Sequences that said nothing for too long",
    "cliffs": "Throughput cliffs found",
    "submitted": "Requests taken into the queue",
    "placed": "Requests that got a place",
}
GAUGES = {
    "level": "Halvings of the batch in force",
    "capacity": "Share of its usual throughput that the engine is believed to have",
    "batch": "Size of a batch in force",
    "places": "Sequences that may run at once",
    "backing_off": "Requests waiting for their next try",
    "kv_blocks": "KV blocks promised",
}
Row = tuple[tuple[str, ...], BatchingCounts]


class QueueMetrics(Collector):
    """where: model, region and stage of the instance."""

    def __init__(self, engine: Engine, where: tuple[str, str, str]) -> None:
        self._engine, self._where = engine, where

    def collect(self) -> Iterator[Metric]:
        rows = list(self._rows())
        if not rows:
            return
        for name, text in COUNTERS.items():
            yield _each(CounterMetricFamily(f"weir_batching_{name}", text, labels=LABELS), rows, name)
        for name, text in GAUGES.items():
            yield _each(GaugeMetricFamily(f"weir_batching_{name}", text, labels=LABELS), rows, name)
        delay = GaugeMetricFamily(
            "weir_batching_delay_seconds", "Longest wait for a fuller batch", labels=LABELS
        )
        waited = HistogramMetricFamily("vllm:request_queue_time_seconds", "In the queue", labels=LABELS)
        queued = GaugeMetricFamily("weir_batching_queued", "Waiting, by class", labels=(*LABELS, "class"))
        refused = CounterMetricFamily("weir_batching_refusals", "Refused, by code", labels=(*LABELS, "code"))
        for labels, counts in rows:
            delay.add_metric(labels, counts.delay_ms / 1000)
            waited.add_metric(labels, _buckets(counts), counts.wait_s)
            for name, count in counts.queue_by_class.items():
                queued.add_metric((*labels, name), count)
            for code, count in counts.refusals.items():
                refused.add_metric((*labels, code), count)
        yield from (delay, waited, queued, refused)

    def _rows(self) -> Iterator[Row]:
        model, region, stage = self._where
        for role, layer in layers(self._engine):
            if isinstance(layer, Batches):
                yield (model, layer.facts().name, region, stage, role), layer.counts()


def _each(family: Metric, rows: list[Row], name: str) -> Metric:
    for labels, counts in rows:
        family.add_metric(labels, float(getattr(counts, name)))  # type: ignore[attr-defined]
    return family


def _buckets(counts: BatchingCounts) -> list[tuple[str, float]]:
    told = [(repr(bound), float(n)) for bound, n in zip(WAIT_BUCKETS_S, counts.wait_buckets, strict=False)]
    return [*told, ("+Inf", float(counts.waits))]
