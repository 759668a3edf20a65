"""A real Prometheus watches the mesh with what `weir metrics` prints; its rules under promtool.

Law: one Prometheus per test (tests/e2e/prometheus_process.py).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mesh.world import prometheus
from mesh.xds.names import BY_TAG_METRIC
from tests.e2e.mesh_world import CANARY, MeshWorld, failures
from tests.e2e.prometheus_process import (
    Prometheus,
    alert_case,
    alerts_of,
    lacking_cases,
    number,
    promtool,
    rule_test,
    rules_file,
    running,
    series_name,
    weir_prints,
)

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

OWN = (
    "weir_xds_streams",
    "weir_xds_pushes_total",
    "weir_xds_acks_total",
    "weir_watch_age_seconds",
    "weir_change_applied_seconds_count",
    "weir_xds_push_to_ack_seconds_count",
    "weir_traffic_share",
    "weir_path_up",
)


def test_a_real_prometheus_sees_the_colours(calm: MeshWorld, tmp_path: Path) -> None:
    calm.put("us-east-1", CANARY, "0.15")
    calm.applied(0.15)
    calm.load(60, 2)  # every counter exists before the first scrape, or its first step would not be seen
    with running(calm, tmp_path) as watcher:
        calm.until("all is scraped", lambda: len(watcher.query('up{job=~"weir-.+"} == 1')) == 15, 40.0)
        samples: list[Any] = []
        load = threading.Thread(target=lambda: samples.extend(calm.load(60, 40)))
        load.start()
        try:
            calm.until("the deviation has a value", lambda: watcher.query(prometheus.DEVIATION))
        finally:
            load.join()
        assert not failures(samples)
        query = weir_prints("metrics", "query").strip()
        # The last seconds of the load must have been scraped.
        sent = sum(s.ok for s in samples)
        counted = f'sum(increase({BY_TAG_METRIC}{{code="200"}}[2m]))'
        calm.until("all is counted", lambda: number(watcher.query(counted)) > 0.9 * sent, 40.0)
        rows = watcher.query(query)
        assert [row["metric"] for row in rows] == [{"service": "chat"}]
        assert number(rows) < 0.05
        assert number(watcher.query(prometheus.DEVIATION)) < 0.05
        # A scrape has a second here; after one that came too late its series are away until the next.
        calm.until("every ingress counts every colour", lambda: _every_ingress_counts(calm, watcher))
        for name in OWN:
            calm.until(
                f"{name} of every region", lambda name=name: _tellers(watcher, name) == set(calm.names)
            )
        alerts = {row["metric"]["alertname"] for row in watcher.query('ALERTS{alertstate="firing"}')}
        assert not alerts


def _tellers(watcher: Prometheus, metric: str) -> set[str]:
    return {row["metric"]["ingress_region"] for row in watcher.query(metric)}


def _every_ingress_counts(world: MeshWorld, watcher: Prometheus) -> bool:
    # Other tests of the same world have been refused some requests: "-" is who answered those.
    rows = [row["metric"] for row in watcher.query(f'{BY_TAG_METRIC}{{region!="-",code="200"}}')]
    seen = {(m["ingress_region"], m["service"], m["region"], m["stage"]) for m in rows}
    return seen == {
        (ingress, "chat", region, stage)
        for ingress in world.names
        for region in world.names
        for stage in ("stable", "canary")
    }


def test_a_refused_value_is_an_alert_in_waiting(calm: MeshWorld, tmp_path: Path) -> None:
    with running(calm, tmp_path) as watcher:
        calm.put("us-east-1", CANARY, "abc")
        pending = 'ALERTS{alertname="ConfigRefused"}'
        rows = calm.until("the alert is pending", lambda: watcher.query(pending), 40.0)
        assert rows[0]["metric"]["service"] == "chat"
        calm.delete("us-east-1", CANARY)
        calm.until("it is over", lambda: not watcher.query(pending), 40.0)


# -- the rules alone, in promtool's own time ------------------

ON = {"severity": "warning", "team": "mesh"}
STABLE, DYED = ("cn-north-1", "stable"), ("cn-north-1", "canary")
SHOULD = {STABLE: 0.85, DYED: 0.15}


def _series(metric: str, owner: tuple[str, str], values: str, **labels: str) -> dict[str, str]:
    region, stage = owner
    every = {"service": "chat", "region": region, "stage": stage, **labels}
    return {"series": series_name(metric, every), "values": values}


def _flow(per_step: Mapping[tuple[str, str], int]) -> list[dict[str, str]]:
    """So many requests answered by each owner in a step."""
    return [
        _series(BY_TAG_METRIC, owner, f"0+{count}x60", code="200", ingress_region="x")
        for owner, count in per_step.items()
    ]


def _intended(shares: Mapping[tuple[str, str], float]) -> list[dict[str, str]]:
    """The same order, told by two control planes."""
    return [
        _series("weir_traffic_share", owner, f"{share}x60", ingress_region=plane)
        for owner, share in shares.items()
        for plane in ("x", "y")
    ]


def _ups(up: str) -> list[dict[str, str]]:
    jobs = ("weir-ingress", "weir-control-plane")
    return [{"series": f'up{{job="{job}",ingress_region="x"}}', "values": f"{up}x60"} for job in jobs]


def _dye_alert(off: str) -> dict[str, Any]:
    return {
        "exp_labels": {**ON, "service": "chat"},
        "exp_annotations": {
            "summary": "Traffic of chat is not where it was sent",
            "description": f"The share of a region and stage is off by {off}.",
        },
    }


def _unwatched(job: str, region: str) -> dict[str, Any]:
    labels = {"job": job, "ingress_region": region} if region else {"job": job}
    return {
        "exp_labels": {**ON, **labels},
        "exp_annotations": {
            "summary": f"{job} {region} isn't scraped",
            "description": "No answer, or no such target; see `weir metrics config`.",
        },
    }


REFUSED = {
    "exp_labels": {**ON, "service": "chat"},
    "exp_annotations": {
        "summary": "A value under config/traffic/ is refused for chat",
        "description": "The last good value is in force; see `weir traffic show`.",
    },
}
KV = 'weir_kv_refused{service="chat",ingress_region="x"}'
BOTH = [_unwatched("weir-ingress", "x"), _unwatched("weir-control-plane", "x")]
NEITHER = [_unwatched("weir-ingress", ""), _unwatched("weir-control-plane", "")]

CASES: dict[str, tuple[str, list[dict[str, str]], list[dict[str, Any]]]] = {
    "dye fires: the canary gets nothing": (
        "DyeDeviation",
        _flow({STABLE: 3000}) + _intended(SHOULD),
        [_dye_alert("15%")],
    ),
    "dye fires: traffic where none was ordered": (
        "DyeDeviation",
        _flow({STABLE: 1500, DYED: 1500}) + _intended({STABLE: 1.0}),
        [_dye_alert("50%")],
    ),
    "dye silent: as ordered": ("DyeDeviation", _flow({STABLE: 2550, DYED: 450}) + _intended(SHOULD), []),
    "dye silent: so few that it may be chance": ("DyeDeviation", _flow({STABLE: 3}) + _intended(SHOULD), []),
    "dye missing: no traffic": ("DyeDeviation", _flow({STABLE: 0, DYED: 0}) + _intended(SHOULD), []),
    "dye missing: never a request": ("DyeDeviation", _intended(SHOULD), []),
    "dye missing: nobody knows the order": ("DyeDeviation", [], []),
    "refused fires": ("ConfigRefused", [{"series": KV, "values": "1x60"}], [REFUSED]),
    "refused silent": ("ConfigRefused", [{"series": KV, "values": "0x60"}], []),
    "refused missing": ("ConfigRefused", [], []),
    "watched fires: no answer": ("MeshNotWatched", _ups("0"), BOTH),
    "watched silent": ("MeshNotWatched", _ups("1"), []),
    "watched missing: no such target": ("MeshNotWatched", [], NEITHER),
}


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rules_file(tmp_path_factory.mktemp("rules"))


def test_the_rules_are_well_formed_and_every_alert_has_its_cases(rules: Path) -> None:
    done = promtool("check", "rules", str(rules))
    assert done.returncode == 0, done.stdout + done.stderr
    assert not lacking_cases(alerts_of(rules, "weir-dye"), CASES)


@pytest.mark.parametrize("alert", sorted({row[0] for row in CASES.values()}))
def test_an_alert_fires_when_it_should_and_only_then(rules: Path, tmp_path: Path, alert: str) -> None:
    rule_test(rules, tmp_path, *(alert_case(*row) for row in CASES.values() if row[0] == alert))
