"""A real Prometheus on real executors: tokens by tenant, region and stage; S5's alert under promtool."""

from __future__ import annotations

import json
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from mesh.world.addresses import EXECUTOR
from mesh.world.executor_rules import JOB, QUERIES, RECORDED
from tests.e2e.mesh_world import MeshWorld
from tests.e2e.prometheus_process import (
    Prometheus,
    alert_case,
    alerts_of,
    case,
    lacking_cases,
    rule_test,
    rules_file,
    running,
    series_name,
)

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

Owner = tuple[str, str, str]
TENANTS = {"gold-demo": 3, "bronze-demo": 5, "": 2, "nobody": 4}
"""Tenant as the client says it → tokens per request."""


def _ask(world: MeshWorld, region: str, number: int, tenant: str, tokens: int) -> None:
    """One completion at one executor, past the mesh: the mesh's own counting has tests of its own."""
    url = f"http://{world.world.address(region).instance(number)}:{EXECUTOR}/v1/completions"
    headers = {"content-type": "application/json"} | ({"x-weir-tenant": tenant} if tenant else {})
    body = json.dumps({"prompt": "deep", "max_tokens": tokens}).encode()
    with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=30) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] == tokens


def _owners(watcher: Prometheus, query: str) -> dict[Owner, float]:
    rows = watcher.query(query)
    return {
        (row["metric"]["tenant"], row["metric"]["region"], row["metric"]["stage"]): float(row["value"][1])
        for row in rows
    }


def _round(world: MeshWorld, times: int) -> Counter[Owner]:
    """Ask every executor as every tenant; the tokens that must be counted."""
    sent: Counter[Owner] = Counter()
    for region in world.names:
        for one in world.world.spec.members(region):
            for tenant, tokens in TENANTS.items():
                label = {"": "default", "nobody": "other"}.get(tenant, tenant)
                for _ in range(times):
                    _ask(world, region, one.number, tenant, tokens)
                    sent[label, region, one.stage] += tokens
    return sent


def test_tokens_by_tenant_region_and_stage_come_out_right(calm: MeshWorld, tmp_path: Path) -> None:
    _round(calm, 1)  # every series exists before the first scrape, or its first step would not be seen
    total = "sum by (tenant, region, stage) (vllm:generation_tokens_total)"
    with running(calm, tmp_path) as watcher:
        calm.until("all are scraped", lambda: len(watcher.query(f'up{{job="{JOB}"}} == 1')) == 9, 40.0)
        calm.until("the tokens are there", lambda: watcher.query(total), 20.0)
        before = _owners(watcher, total)
        sent = _round(calm, 4)

        def counted() -> bool:
            now = _owners(watcher, total)
            return {owner: round(now[owner] - before[owner]) for owner in sent} == dict(sent)

        calm.until("every token is counted where it was made", counted, 40.0)
        rates = calm.until("the dashboard query answers", lambda: _owners(watcher, QUERIES["tokens"]), 40.0)
        assert sent.keys() <= rates.keys()
        # Rates are extrapolated; their proportions are those of what was sent.
        gold, bronze = (
            sum(rate for owner, rate in rates.items() if owner[0] == tenant)
            for tenant in ("gold-demo", "bronze-demo")
        )
        assert bronze / gold == pytest.approx(5 / 3, rel=0.05)
        for name in RECORDED:
            calm.until(f"{name} is recorded", lambda name=name: watcher.query(name), 40.0)
        # A scrape has a second here. After one that came too late its series are away until the next, and an
        # alert is pending.
        for name, query in QUERIES.items():
            calm.until(f"{name} answers", lambda query=query: watcher.query(query), 40.0)
        every = {one.id for region in calm.names for one in calm.world.spec.members(region)}

        def all_well() -> bool:
            rows = watcher.query(f'model_health_status{{job="{JOB}"}} == 1')
            return {row["metric"]["executor"] for row in rows} == every and not watcher.query("ALERTS")

        calm.until("all are healthy, and no alert is even pending", all_well, 40.0)


# -- the rules alone, in promtool's own time ------------------

WHERE = {
    "region": "cn-north-1",
    "stage": "canary",
    "executor": "chat-canary-2",
    "instance": "a:1",
    "job": JOB,
}
HEALTH = WHERE | {"model_name": "m", "engine": "torch"}
ON = {"severity": "critical", "team": "serving"}


def _health(values: str) -> list[dict[str, str]]:
    return [{"series": series_name("model_health_status", HEALTH), "values": values}]


def _up(values: str) -> list[dict[str, str]]:
    return [{"series": series_name("up", WHERE), "values": values}]


ENGINE = WHERE | {"model_name": "m", "engine": "primary"}


def _first(values: str) -> list[dict[str, str]]:
    return [{"series": series_name("weir_fallback_engine_dead", ENGINE), "values": values}]


def _unhealthy(share: str) -> dict[str, Any]:
    return {
        "exp_labels": {**ON, **HEALTH},
        "exp_annotations": {
            "summary": "chat-canary-2 (cn-north-1, canary) is not healthy",
            "description": f"Healthy {share} of the last two minutes: replace it.",
        },
    }


SILENT = {
    "exp_labels": {**ON, **WHERE},
    "exp_annotations": {
        "summary": "chat-canary-2 (cn-north-1, canary) doesn't answer",
        "description": "Its /metrics can't be read: it is gone, or stuck.",
    },
}
SECOND = {
    "exp_labels": {**ON, **ENGINE, "severity": "warning"},
    "exp_annotations": {
        "summary": "chat-canary-2 (cn-north-1, canary) answers by its second engine alone",
        "description": "Its first engine is dead: drain and restart it.",
    },
}
# A step is 15 s, so that two minutes hold nine samples; S5: mean below 0.95 for 30 s.
CASES: dict[str, tuple[str, list[dict[str, str]], list[dict[str, Any]], str]] = {
    "unhealthy fires: dead": ("ModelInstanceUnhealthy", _health("1x8 0x40"), [_unhealthy("0%")], "10m"),
    "unhealthy fires: one sample of nine is enough": (
        "ModelInstanceUnhealthy",
        _health("1x19 0 1x20"),
        [_unhealthy("88.89%")],
        "5m45s",
    ),
    "unhealthy silent: not for 30 s yet": ("ModelInstanceUnhealthy", _health("1x19 0 1x20"), [], "5m15s"),
    "unhealthy silent: healed two minutes ago": (
        "ModelInstanceUnhealthy",
        _health("1x19 0 1x20"),
        [],
        "7m15s",
    ),
    "unhealthy silent: healthy": ("ModelInstanceUnhealthy", _health("1x60"), [], "10m"),
    # Why there is a second alert: what was told last stays, and then there is nothing to take a mean of.
    "unhealthy silent: killed": ("ModelInstanceUnhealthy", _health("1x8 _x40"), [], "10m"),
    "unhealthy missing: no such metric": ("ModelInstanceUnhealthy", [], [], "10m"),
    "silent fires: killed": ("ModelInstanceSilent", _up("1x8 0x40"), [SILENT], "10m"),
    "silent silent: it answers": ("ModelInstanceSilent", _up("1x60"), [], "10m"),
    "silent missing: no such target": ("ModelInstanceSilent", [], [], "10m"),
    "second fires: the first is dead": ("ModelInstanceOnFallback", _first("0x8 1x40"), [SECOND], "10m"),
    "second silent: not for a minute yet": ("ModelInstanceOnFallback", _first("0x8 1x40"), [], "2m45s"),
    "second silent: both live": ("ModelInstanceOnFallback", _first("0x60"), [], "10m"),
    "second missing: no second engine": ("ModelInstanceOnFallback", [], [], "10m"),
}


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rules_file(tmp_path_factory.mktemp("rules"))


def test_every_alert_has_its_cases(rules: Path) -> None:
    assert not lacking_cases(alerts_of(rules, "weir-executors"), CASES)


@pytest.mark.parametrize("alert", sorted({row[0] for row in CASES.values()}))
def test_an_alert_fires_when_it_should_and_only_then(rules: Path, tmp_path: Path, alert: str) -> None:
    rule_test(rules, tmp_path, *(alert_case(*row) for row in CASES.values() if row[0] == alert))


def test_the_recorded_tokens_are_per_tenant_region_and_stage(rules: Path, tmp_path: Path) -> None:
    def made(tenant: str, executor: str, per_step: int) -> dict[str, str]:
        labels = HEALTH | {"tenant": tenant, "executor": executor}
        return {
            "series": series_name("vllm:generation_tokens_total", labels),
            "values": f"0+{per_step}x40",
        }

    series = [made("acme", "a", 150), made("acme", "b", 300), made("other", "a", 15)]
    where = {"region": "cn-north-1", "stage": "canary"}
    name = "tenant_region_stage:generation_tokens:rate1m"
    wanted = [
        {"labels": series_name(name, {"tenant": tenant, **where}), "value": value}
        for tenant, value in (("acme", 30.0), ("other", 1.0))
    ]
    expected = {"expr": name, "eval_time": "8m", "exp_samples": wanted}
    rule_test(rules, tmp_path, case(series, promql_expr_test=[expected]))
