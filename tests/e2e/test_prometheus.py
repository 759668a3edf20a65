"""A real Prometheus watches the mesh with what `weir metrics` prints; its rules under promtool.

Law: Prometheus has its own folder and address (127.N.9.1), and dies with the test.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from mesh import tools
from mesh.world import prometheus
from mesh.world.runner import weir_command
from mesh.xds.names import BY_TAG_METRIC
from tests.e2e.mesh_world import CANARY, REPO, MeshWorld, failures

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

PORT = 9090
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


def _weir(*args: str) -> str:
    done = subprocess.run(
        [*weir_command(), *args], cwd=REPO, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout


@dataclass(frozen=True)
class Prometheus:
    url: str

    def query(self, text: str) -> list[dict[str, Any]]:
        """Rows of an instant query: [{"metric": labels, "value": [time, number]}]."""
        where = f"{self.url}/api/v1/query?{urllib.parse.urlencode({'query': text})}"
        with urllib.request.urlopen(where, timeout=10) as answer:
            rows: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        return rows

    def ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=2) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False


@contextlib.contextmanager
def _running(world: MeshWorld, folder: Path) -> Iterator[Prometheus]:
    rules, config = folder / "rules.yml", folder / "prometheus.yml"
    rules.write_text(_weir("metrics", "rules"), encoding="utf-8")
    printed = world.weir("metrics", "config", "--rules-file", str(rules), "--every", "1s")
    assert printed.code == 0, printed.err
    config.write_text(printed.out, encoding="utf-8")
    at = f"127.{world.world.spec.number}.9.1:{PORT}"
    command = ["setpriv", "--pdeathsig", "KILL", str(tools.find("prometheus"))]
    command += [f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
    command += [f"--web.listen-address={at}", "--log.level=warn"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command, env=tools.run_env("prometheus"), stdout=log, stderr=log, cwd=folder
        )
    try:
        found = Prometheus(f"http://{at}")
        world.until(f"Prometheus answers; its log is {folder / 'log'}", found.ready, 60.0)
        yield found
    finally:
        process.kill()
        process.wait()


def test_a_real_prometheus_sees_the_colours(calm: MeshWorld, tmp_path: Path) -> None:
    calm.put("us-east-1", CANARY, "0.15")
    calm.applied(0.15)
    calm.load(60, 2)  # every counter exists before the first scrape, or its first step would not be seen
    with _running(calm, tmp_path) as watcher:
        calm.until("all is scraped", lambda: len(watcher.query('up{job=~"weir-.+"} == 1')) == 6, 40.0)
        samples: list[Any] = []
        load = threading.Thread(target=lambda: samples.extend(calm.load(120, 25)))
        load.start()
        try:
            calm.until("the deviation has a value", lambda: watcher.query(prometheus.DEVIATION), 40.0)
        finally:
            load.join()
        assert not failures(samples)
        query = _weir("metrics", "query").strip()
        # The last seconds of the load must have been scraped.
        sent = sum(s.ok for s in samples)
        counted = f'sum(increase({BY_TAG_METRIC}{{code="200"}}[2m]))'
        calm.until("all is counted", lambda: _number(watcher.query(counted)) > 0.9 * sent, 40.0)
        rows = watcher.query(query)
        assert [row["metric"] for row in rows] == [{"service": "chat"}]
        assert _number(rows) < 0.05
        assert _number(watcher.query(prometheus.DEVIATION)) < 0.05
        _every_ingress_counts(calm, watcher)
        for name in OWN:
            seen = {row["metric"]["ingress_region"] for row in watcher.query(name)}
            assert seen == set(calm.names), name
        alerts = {row["metric"]["alertname"] for row in watcher.query('ALERTS{alertstate="firing"}')}
        assert not alerts


def _number(rows: Sequence[Mapping[str, Any]]) -> float:
    return float(rows[0]["value"][1]) if rows else 0.0


def _every_ingress_counts(world: MeshWorld, watcher: Prometheus) -> None:
    # Other tests of the same world have been refused some requests: "-" is who answered those.
    rows = watcher.query(f'{BY_TAG_METRIC}{{region!="-",code="200"}}')
    for ingress in world.names:
        seen = [row["metric"] for row in rows if row["metric"]["ingress_region"] == ingress]
        assert {m["service"] for m in seen} == {"chat"}
        assert {(m["region"], m["stage"]) for m in seen} == {
            (region, stage) for region in world.names for stage in ("stable", "canary")
        }


def test_a_refused_value_is_an_alert_in_waiting(calm: MeshWorld, tmp_path: Path) -> None:
    with _running(calm, tmp_path) as watcher:
        calm.put("us-east-1", CANARY, "abc")
        pending = 'ALERTS{alertname="ConfigRefused"}'
        rows = calm.until("the alert is pending", lambda: watcher.query(pending), 40.0)
        assert rows[0]["metric"]["service"] == "chat"
        calm.delete("us-east-1", CANARY)
        calm.until("it is over", lambda: not watcher.query(pending), 40.0)


# -- the rules alone, in promtool's own time ------------------

STEP_S = 15
ON = {"severity": "warning", "team": "mesh"}
STABLE, DYED = ("cn-north-1", "stable"), ("cn-north-1", "canary")
SHOULD = {STABLE: 0.85, DYED: 0.15}


def _series(metric: str, owner: tuple[str, str], values: str, **labels: str) -> dict[str, str]:
    region, stage = owner
    every = {"service": "chat", "region": region, "stage": stage, **labels}
    return {"series": f"{metric}{_labels(every)}", "values": values}


def _labels(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{name}="{value}"' for name, value in labels.items()) + "}"


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
    path = tmp_path_factory.mktemp("rules") / "rules.yml"
    path.write_text(_weir("metrics", "rules"), encoding="utf-8")
    return path


def _promtool(*args: str) -> subprocess.CompletedProcess[str]:
    command = [str(tools.find("promtool")), *args]
    env = tools.run_env("promtool")
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)


def test_the_rules_are_well_formed_and_every_alert_has_its_cases(rules: Path) -> None:
    done = _promtool("check", "rules", str(rules))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = yaml.safe_load(rules.read_text())["groups"][0]["rules"]
    alerts = {row["alert"] for row in rows if "alert" in row}
    for alert in alerts:
        names = [name for name, case in CASES.items() if case[0] == alert]
        assert all(any(word in name for name in names) for word in ("fires", "silent", "missing")), alert


@pytest.mark.parametrize("name", CASES)
def test_an_alert_fires_when_it_should_and_only_then(rules: Path, tmp_path: Path, name: str) -> None:
    alert, series, expected = CASES[name]
    case = {
        "interval": f"{STEP_S}s",
        "input_series": series,
        "alert_rule_test": [{"eval_time": "10m", "alertname": alert, "exp_alerts": expected}],
    }
    body = {"rule_files": [str(rules)], "evaluation_interval": f"{STEP_S}s", "tests": [case]}
    path = tmp_path / "test.yml"
    path.write_text(yaml.safe_dump(body), encoding="utf-8")
    done = _promtool("test", "rules", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
