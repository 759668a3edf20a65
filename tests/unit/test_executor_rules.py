"""What Prometheus is told of executors, as data, and the command that prints it."""

from __future__ import annotations

import pytest

from mesh.world import executor_rules as rules
from mesh.world import metrics_cli, prometheus
from regions.cli.errors import UsageError
from services.telemetry.metrics import GAUGES, HISTOGRAMS


def test_the_job_has_one_target_per_executor_and_keeps_its_labels() -> None:
    job = rules.job([rules.Target("r1", "canary", "chat-canary-2", "127.20.1.12:9000")])
    assert job["honor_labels"] is True
    assert job["static_configs"] == [
        {
            "targets": ["127.20.1.12:9000"],
            "labels": {"region": "r1", "stage": "canary", "executor": "chat-canary-2"},
        }
    ]
    config = prometheus.scrape_config([("r1", "a:1", "b:2")], (), "rules.yml")
    assert [one["job_name"] for one in config["scrape_configs"]] == [
        "weir-ingress",
        "weir-control-plane",
        rules.JOB,
    ]
    assert config["rule_files"] == ["rules.yml"]


def test_queries_and_rules_use_the_names_that_executors_tell() -> None:
    told = {name for name, _ in (*GAUGES.values(), *HISTOGRAMS.values())}
    told |= {"vllm:generation_tokens", "vllm:prompt_tokens", "vllm:request_success", "model_health_status"}
    for name, query in rules.QUERIES.items():
        assert any(metric in query for metric in told), name
    for name, query in rules.RECORDED.items():
        assert query in rules.QUERIES.values(), name


def test_s5_stands_in_the_alert_as_it_is() -> None:
    [alert] = [rule for rule in rules.group()["rules"] if rule.get("alert") == "ModelInstanceUnhealthy"]
    assert alert["expr"] == 'avg_over_time(model_health_status{job="weir-executor"}[2m]) < 0.95'
    assert (alert["for"], alert["labels"]["severity"]) == ("30s", "critical")


def test_a_query_is_printed_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    metrics_cli.query()
    metrics_cli.query("tokens")
    assert capsys.readouterr().out.splitlines() == [prometheus.DEVIATION_QUERY, rules.QUERIES["tokens"]]
    with pytest.raises(UsageError, match="there are: dye, tokens"):
        metrics_cli.query("jokes")
