"""Prometheus metrics under the names that users know from vLLM.

Law: reads tallies, statistics and flags when it is asked, and counts nothing itself. A metric has one source:
where an upstream server's own metrics are passed on, a name that is ours stays ours.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from services.engine import EngineFacts, EngineStats
from services.lifecycle import State
from services.telemetry.tally import Series, Tally

log = logging.getLogger("weir.executor")

_PER_REQUEST = ("model_name", "engine", "region", "stage", "tenant")
_PER_ENGINE = _PER_REQUEST[:-1]
_EXTRA = re.compile(r'([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{([a-zA-Z_]\w*)="([^"\\\n]*)"\})?')

_SLEEPS = (State.ASLEEP, State.COLD, State.WAKING)
_TOLD_ELSEWHERE = ("batching_", "secondary_batching_")
"""services/telemetry/queues.py has these, and more of them."""

HISTOGRAMS: Mapping[str, tuple[str, str]] = {
    "first": ("vllm:time_to_first_token_seconds", "From the request to its first token"),
    "between": ("vllm:inter_token_latency_seconds", "Between two tokens of a sequence"),
    "per_token": (
        "vllm:request_time_per_output_token_seconds",
        "Mean of a sequence, without its first token",
    ),
    "whole": ("vllm:e2e_request_latency_seconds", "From the request to its last token"),
}
"""Field of tally.Series → name and help."""
GAUGES: Mapping[str, tuple[str, str]] = {
    "running": ("vllm:num_requests_running", "Sequences running"),
    "waiting": ("vllm:num_requests_waiting", "Sequences waiting"),
    "kv_used": ("vllm:kv_cache_usage_perc", "Share of the KV cache in use; 1 is all"),
    "fragmentation": ("weir_engine_fragmentation", "Share of reserved device memory that nothing uses"),
    "memory_bytes": ("weir_engine_memory_bytes", "Device memory held"),
    "capacity": ("weir_engine_capacity", "Share of its normal throughput that the engine believes to have"),
}
"""Field of EngineStats → name and help."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where figures come from. why_ill: why the instance is broken, or "". upstream: metrics of the server
    behind the engine in Prometheus' text form, "" where there are none."""

    model: str
    region: str
    stage: str
    tally: Tally
    facts: Callable[[], EngineFacts]
    stats: Callable[[], EngineStats]
    why_ill: Callable[[], str]
    state: Callable[[], State]
    upstream: Callable[[], str]


class EngineMetrics(Collector):
    """Everything about the engine and its sequences. more: what else is ours."""

    def __init__(self, source: Source, *more: Collector) -> None:
        self._of, self._more = source, more

    def collect(self) -> Iterator[Metric]:
        ours = list(self._ours())
        for one in self._more:
            ours += one.collect()
        yield from ours
        yield from _others(self._of.upstream(), {metric.name for metric in ours})

    def _ours(self) -> Iterator[Metric]:
        it = self._of
        facts, stats = it.facts(), it.stats()
        labels = (it.model, facts.name, it.region, it.stage)
        for name, (metric, text) in GAUGES.items():
            yield _one(GaugeMetricFamily(metric, text, labels=_PER_ENGINE), labels, getattr(stats, name))
        preempted = CounterMetricFamily("vllm:num_preemptions", "Sequences put back", labels=_PER_ENGINE)
        yield _one(preempted, labels, stats.preemptions)
        healthy = GaugeMetricFamily("model_health_status", "1: healthy, 0: broken", labels=_PER_ENGINE)
        yield _one(healthy, labels, float(not it.why_ill()))
        yield _sleep_state(labels, it.state())
        yield _cache_config(labels, facts)
        yield from _counters(it)
        yield from _histograms(it)
        yield from extra(stats.extra, labels)


def _one(family: Metric, labels: tuple[str, ...], value: float) -> Metric:
    family.add_metric(labels, value)  # type: ignore[attr-defined]
    return family


def _sleep_state(labels: tuple[str, ...], state: State) -> Metric:
    """As vLLM tells it; services/pool/metrics.py tells all states."""
    family = GaugeMetricFamily(
        "vllm:engine_sleep_state", "1 for awake or asleep", labels=(*_PER_ENGINE, "sleep_state")
    )
    family.add_metric((*labels, "awake"), float(state not in _SLEEPS))
    family.add_metric((*labels, "asleep"), float(state in _SLEEPS))
    return family


def _cache_config(labels: tuple[str, ...], facts: EngineFacts) -> Metric:
    names = (*_PER_ENGINE, "block_size", "num_blocks", "max_model_len", "max_num_seqs")
    block = max(1, facts.kv_block)
    values = (block, facts.kv_tokens // block, facts.context, facts.sequences)
    family = GaugeMetricFamily("vllm:cache_config_info", "What the KV cache is", labels=names)
    family.add_metric((*labels, *map(str, values)), 1.0)
    return family


def _counters(it: Source) -> Iterator[Metric]:
    prompt = CounterMetricFamily("vllm:prompt_tokens", "Tokens of prompts", labels=_PER_REQUEST)
    made = CounterMetricFamily("vllm:generation_tokens", "Tokens made", labels=_PER_REQUEST)
    success = CounterMetricFamily(
        "vllm:request_success",
        "Sequences by why they ended; abort is a client that left or a fault",
        labels=(*_PER_REQUEST, "finished_reason"),
    )
    for labels, series in _series(it):
        prompt.add_metric(labels, series.prompt_tokens)
        made.add_metric(labels, series.tokens)
        for why, count in series.finished.items():
            success.add_metric((*labels, why), count)
    yield from (prompt, made, success)


def _histograms(it: Source) -> Iterator[Metric]:
    for name, (metric, text) in HISTOGRAMS.items():
        family = HistogramMetricFamily(metric, text, labels=_PER_REQUEST)
        for labels, series in _series(it):
            buckets = getattr(series, name)
            family.add_metric(labels, buckets.cumulative(), buckets.total)
        yield family


def _series(it: Source) -> Iterator[tuple[tuple[str, ...], Series]]:
    for (tenant, engine), series in it.tally.series.items():
        yield (it.model, engine, it.region, it.stage, tenant), series


def extra(values: Mapping[str, float], labels: tuple[str, ...]) -> Iterable[Metric]:
    """An engine's own figures: `name` or `name{label="value"}` → value. `…_total` is a counter; names without
    a prefix of the house get `weir_engine_`. A name that Prometheus can't have is left out, and logged."""
    families: dict[str, Metric] = {}
    for key, value in values.items():
        if key.startswith(_TOLD_ELSEWHERE):
            continue
        found = _EXTRA.fullmatch(key)
        if found is None:
            log.warning("the engine's figure %r has no name that a metric can have", key)
            continue
        name, label, content = found.groups()
        name = name if name.startswith(("weir_", "vllm:")) else f"weir_engine_{name}"
        if name not in families:
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            families[name] = kind(
                name.removesuffix("_total") if kind is CounterMetricFamily else name,
                "Told by the engine",
                labels=(*_PER_ENGINE, *((label,) if label else ())),
            )
        _one(families[name], (*labels, *((content,) if label else ())), value)
    return families.values()


def _others(text: str, taken: set[str]) -> Iterator[Metric]:
    """An upstream server's metrics, less those that are ours already."""
    try:
        found = [family for family in text_string_to_metric_families(text) if family.name not in taken]
    except ValueError as error:
        log.warning("the upstream server's metrics can't be read: %s", error)
        return
    yield from found
