"""Metrics under vLLM's names: counted right, bounded, well-formed, no name twice."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from services.engine import EngineFacts, EngineStats
from services.lifecycle import State
from services.telemetry.metrics import EngineMetrics, Source
from services.telemetry.tally import REQUEST_S, TOKEN_S, Buckets, Tally, Watch
from tests.unit.executor import CHAT, CHAT_PATH, TEXT, TEXT_PATH, Running, served
from tests.unit.scripted import Scripted


class Hand:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.at = 100.0

    def __call__(self) -> float:
        return self.at


def test_a_watch_measures_what_its_names_say() -> None:
    now, tally = Hand(), Tally()
    watch = Watch(tally, "acme", now)
    assert watch.first_s is None
    now.at += 0.5
    watch.first("torch", 12)
    for _ in range(4):
        now.at += 0.02
        watch.token()
    now.at += 0.1
    watch.ended("length", "torch")
    series = tally.of("acme", "torch")
    assert (series.tokens, series.prompt_tokens, series.finished) == (5, 12, {"length": 1})
    assert watch.first_s == 0.5
    assert (series.first.total, sum(series.first.counts)) == (0.5, 1)
    assert (pytest.approx(series.between.total), sum(series.between.counts)) == (0.08, 4)
    assert (pytest.approx(series.per_token.total), sum(series.per_token.counts)) == (0.02, 1)
    assert (pytest.approx(series.whole.total), sum(series.whole.counts)) == (0.68, 1)


def test_what_was_cut_short_has_no_latency_but_is_counted() -> None:
    tally = Tally()
    watch = Watch(tally, "acme", Hand())
    watch.ended("", "torch")
    series = tally.of("acme", "torch")
    assert series.finished == {"abort": 1}
    assert not sum(series.whole.counts)


@given(st.lists(st.floats(0, 1e5), max_size=40))
def test_buckets_are_what_prometheus_calls_a_histogram(values: list[float]) -> None:
    buckets = Buckets(TOKEN_S)
    for value in values:
        buckets.observe(value)
    rows = buckets.cumulative()
    assert rows[-1] == ("+Inf", float(len(values)))
    for bound, count in rows[:-1]:
        assert count == sum(value <= float(bound) for value in values)
    assert buckets.total == pytest.approx(sum(values))
    assert list(REQUEST_S) == sorted(set(REQUEST_S))


def families(stats: EngineStats, upstream: str = "", facts: EngineFacts | None = None) -> str:
    registry, tally = CollectorRegistry(), Tally()
    watch = Watch(tally, "acme", Hand())
    watch.first("torch", 3)
    watch.ended("stop", "torch")
    given_facts = facts or EngineFacts("torch", "m", context=64, sequences=4, kv_tokens=320, kv_block=16)
    source = Source(
        model="m",
        region="r",
        stage="s",
        tally=tally,
        facts=lambda: given_facts,
        stats=lambda: stats,
        why_ill=lambda: stats.dead,
        state=lambda: State.RUNNING,
        upstream=lambda: upstream,
    )
    registry.register(EngineMetrics(source))
    return generate_latest(registry).decode()


def rows(text: str) -> dict[str, list[SimpleNamespace]]:
    found: dict[str, list[SimpleNamespace]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(
                SimpleNamespace(labels=sample.labels, value=sample.value, kind=family.type)
            )
    return found


def test_names_and_labels_are_vllms_and_ours() -> None:
    found = rows(families(EngineStats(running=2, waiting=3, kv_used=0.5, preemptions=7)))
    where = {"model_name": "m", "engine": "torch", "region": "r", "stage": "s"}
    for name, value in {
        "vllm:num_requests_running": 2,
        "vllm:num_requests_waiting": 3,
        "vllm:kv_cache_usage_perc": 0.5,
        "vllm:num_preemptions_total": 7,
        "model_health_status": 1,
    }.items():
        assert [(row.labels, row.value) for row in found[name]] == [(where, value)]
    tenant = where | {"tenant": "acme"}
    assert [(r.labels, r.value) for r in found["vllm:prompt_tokens_total"]] == [(tenant, 3)]
    assert [(r.labels, r.value) for r in found["vllm:generation_tokens_total"]] == [(tenant, 1)]
    assert found["vllm:request_success_total"][0].labels == tenant | {"finished_reason": "stop"}
    for name in (
        "vllm:time_to_first_token_seconds",
        "vllm:inter_token_latency_seconds",
        "vllm:request_time_per_output_token_seconds",
        "vllm:e2e_request_latency_seconds",
    ):
        assert found[f"{name}_count"][0].labels == tenant
        assert found[f"{name}_bucket"][-1].labels == tenant | {"le": "+Inf"}
    info = found["vllm:cache_config_info"][0].labels
    assert (info["block_size"], info["num_blocks"], info["max_model_len"]) == ("16", "20", "64")


def test_sleeping_is_told_as_vllm_tells_it() -> None:
    async def test(it: Running) -> None:
        assert it.sample("vllm:engine_sleep_state", sleep_state="awake") == 1
        it.instance.lifecycle.to(State.DRAINING)
        assert it.sample("vllm:engine_sleep_state", sleep_state="awake") == 1, "not yet"
        it.instance.lifecycle.to(State.ASLEEP)
        assert it.sample("vllm:engine_sleep_state", sleep_state="awake") == 0
        assert it.sample("vllm:engine_sleep_state", sleep_state="asleep") == 1
        assert it.sample("model_health_status") == 1, "asleep is not ill"

    served(test)


def test_a_dead_engine_is_not_healthy() -> None:
    assert rows(families(EngineStats(dead="gone")))["model_health_status"][0].value == 0


def test_an_engines_own_figures_get_names_and_kinds() -> None:
    extra = {
        "cliffs_total": 3.0,
        'refusals_total{reason="queue_full"}': 2.0,
        'refusals_total{reason="kv_full"}': 1.0,
        'weir_fallback_active{reason="engine_error"}': 1.0,
        "batch": 16.0,
        "no name at all!": 1.0,
        'bad{label="a\nb"}': 1.0,
    }
    found = rows(families(EngineStats(extra=extra)))
    assert found["weir_engine_cliffs_total"][0].kind == "counter"
    assert {row.labels["reason"]: row.value for row in found["weir_engine_refusals_total"]} == {
        "queue_full": 2,
        "kv_full": 1,
    }
    assert found["weir_fallback_active"][0].kind == "gauge"
    assert found["weir_engine_batch"][0].value == 16
    assert not [name for name in found if "no" in name and "name" in name]


UPSTREAM = """\
# HELP vllm:prefix_cache_hits_total Hits.
# TYPE vllm:prefix_cache_hits_total counter
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 5.0
# HELP vllm:num_requests_running Running.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 99.0
# HELP vllm:time_to_first_token_seconds TTFT.
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf",model_name="m"} 1.0
vllm:time_to_first_token_seconds_count{engine="0",model_name="m"} 1.0
vllm:time_to_first_token_seconds_sum{engine="0",model_name="m"} 1.0
# HELP python_gc_objects_collected_total Objects.
# TYPE python_gc_objects_collected_total counter
python_gc_objects_collected_total{generation="0"} 5.0
"""


def test_an_upstream_servers_metrics_are_passed_on_and_none_comes_twice() -> None:
    text = families(EngineStats(running=1), UPSTREAM)
    found = rows(text)
    assert found["vllm:prefix_cache_hits_total"][0].value == 5
    assert [row.value for row in found["vllm:num_requests_running"]] == [1]
    assert "python_gc_objects_collected_total" in found
    named = Counter(line.split()[2] for line in text.splitlines() if line.startswith("# TYPE"))
    assert not [name for name, count in named.items() if count > 1]
    samples = Counter(line.rsplit(" ", 1)[0] for line in text.splitlines() if not line.startswith("#"))
    assert not [name for name, count in samples.items() if count > 1]


def test_an_upstream_server_that_tells_nonsense_takes_only_its_own_metrics_with_it() -> None:
    assert "vllm:num_requests_running" in rows(families(EngineStats(), 'a{b="c 1 2 3\n{{{'))


def test_an_executor_tells_it_all_by_http() -> None:
    async def test(it: Running) -> None:
        await it.post(TEXT_PATH, TEXT, {"x-weir-tenant": "gold-demo"})
        await it.stream(CHAT_PATH, CHAT)
        found = rows(await it.metrics())
        made = {row.labels["tenant"]: row.value for row in found["vllm:generation_tokens_total"]}
        assert made == {"gold-demo": 3, "default": 3}
        labels = found["vllm:generation_tokens_total"][0].labels
        assert (labels["region"], labels["stage"], labels["model_name"]) == ("westeurope", "canary", "echo-1")
        assert found["weir_executor_tokens_total"][0].value == 6
        assert found["vllm:inter_token_latency_seconds_count"][0].value == 2
        assert found["weir_executor_in_flight"][0].value == 0

    served(test, engine=Scripted(["a", "b", "c"]))
