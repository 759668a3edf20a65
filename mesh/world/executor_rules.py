"""What a Prometheus needs to know of executors: a scrape job, queries per tenant, region and stage, alerts.

Law: pure data. Names are those that executors tell (services/telemetry/metrics.py), which are vLLM's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

JOB = "weir-executor"
BY = "by (tenant, region, stage)"
QUANTILE = 0.95
UNHEALTHY_BELOW = 0.95
"""S5: the mean of model_health_status over two minutes."""


def _rate(metric: str) -> str:
    return f"sum {BY} (rate({metric}[1m]))"


def _p95(metric: str) -> str:
    return f"histogram_quantile({QUANTILE}, sum by (le, tenant, region, stage) (rate({metric}_bucket[1m])))"


QUERIES: Mapping[str, str] = {
    "tokens": _rate("vllm:generation_tokens_total"),
    "prompt-tokens": _rate("vllm:prompt_tokens_total"),
    "requests": _rate("vllm:request_success_total"),
    "first-token": _p95("vllm:time_to_first_token_seconds"),
    "per-token": _p95("vllm:inter_token_latency_seconds"),
    "latency": _p95("vllm:e2e_request_latency_seconds"),
    "running": "sum by (region, stage) (vllm:num_requests_running)",
    "waiting": "sum by (region, stage) (vllm:num_requests_waiting)",
    "kv": "avg by (region, stage) (vllm:kv_cache_usage_perc)",
    "health": "avg by (region, stage) (model_health_status)",
}
"""What the dashboard shows: per second, in seconds (95th percentile), in sequences, in shares of 1."""

RECORDED: Mapping[str, str] = {
    "tenant_region_stage:generation_tokens:rate1m": QUERIES["tokens"],
    "tenant_region_stage:prompt_tokens:rate1m": QUERIES["prompt-tokens"],
    "tenant_region_stage:requests:rate1m": QUERIES["requests"],
    "tenant_region_stage:time_to_first_token_seconds:p95_1m": QUERIES["first-token"],
    "tenant_region_stage:inter_token_latency_seconds:p95_1m": QUERIES["per-token"],
    "tenant_region_stage:e2e_request_latency_seconds:p95_1m": QUERIES["latency"],
}


@dataclass(frozen=True, slots=True)
class Target:
    """One executor. address: host:port of its /metrics."""

    region: str
    stage: str
    instance: str
    address: str


def job(targets: Sequence[Target]) -> dict[str, Any]:
    """The scrape job. `region` and `stage` are the executor's own labels; `up` gets the same from here."""
    return {
        "job_name": JOB,
        "metrics_path": "/metrics",
        "honor_labels": True,
        "static_configs": [
            {
                "targets": [one.address],
                "labels": {"region": one.region, "stage": one.stage, "executor": one.instance},
            }
            for one in targets
        ],
    }


def group() -> dict[str, Any]:
    """Recording rules and alerts."""
    recorded: list[dict[str, Any]] = [{"record": name, "expr": expr} for name, expr in RECORDED.items()]
    return {"name": "weir-executors", "rules": [*recorded, _unhealthy(), _silent(), _second()]}


_LABELS = {"severity": "critical", "team": "serving"}
_WHO = "{{ $labels.executor }} ({{ $labels.region }}, {{ $labels.stage }})"


def _unhealthy() -> dict[str, Any]:
    """S5."""
    return {
        "alert": "ModelInstanceUnhealthy",
        "expr": f'avg_over_time(model_health_status{{job="{JOB}"}}[2m]) < {UNHEALTHY_BELOW}',
        "for": "30s",
        "labels": _LABELS,
        "annotations": {
            "summary": f"{_WHO} is not healthy",
            "description": "Healthy {{ $value | humanizePercentage }} of the last two minutes: replace it.",
        },
    }


def _silent() -> dict[str, Any]:
    """One that was killed tells no health: its last word, "healthy", would stand for ever."""
    return {
        "alert": "ModelInstanceSilent",
        "expr": f'up{{job="{JOB}"}} == 0',
        "for": "30s",
        "labels": _LABELS,
        "annotations": {
            "summary": f"{_WHO} doesn't answer",
            "description": "Its /metrics can't be read: it is gone, or stuck.",
        },
    }


def _second() -> dict[str, Any]:
    """An instance whose first engine is dead still answers, by its second one: its health stays 1."""
    return {
        "alert": "ModelInstanceOnFallback",
        "expr": f'weir_fallback_engine_dead{{job="{JOB}",engine="primary"}} == 1',
        "for": "1m",
        "labels": {**_LABELS, "severity": "warning"},
        "annotations": {
            "summary": f"{_WHO} answers by its second engine alone",
            "description": "Its first engine is dead: drain and restart it.",
        },
    }
