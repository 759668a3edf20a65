"""A real Prometheus on a world, and promtool on rules alone.

Law: Prometheus has its own folder and address (127.N.9.1), and dies with the test.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mesh import tools
from mesh.world.runner import weir_command
from tests.e2e.mesh_world import REPO, MeshWorld

PORT = 9090
STEP_S = 15


def weir_prints(*args: str) -> str:
    done = subprocess.run(
        [*weir_command(), *args], cwd=REPO, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout


def number(rows: Sequence[Mapping[str, Any]]) -> float:
    """The value of the first row; 0 where there is none."""
    return float(rows[0]["value"][1]) if rows else 0.0


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
def running(world: MeshWorld, folder: Path) -> Iterator[Prometheus]:
    """With what `weir metrics` prints for this world."""
    rules, config = rules_file(folder), folder / "prometheus.yml"
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


def rules_file(folder: Path) -> Path:
    path = folder / "rules.yml"
    path.write_text(weir_prints("metrics", "rules"), encoding="utf-8")
    return path


def promtool(*args: str) -> subprocess.CompletedProcess[str]:
    command = [str(tools.find("promtool")), *args]
    env = tools.run_env("promtool")
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)


def series_name(metric: str, labels: Mapping[str, str]) -> str:
    return metric + "{" + ",".join(f'{name}="{value}"' for name, value in labels.items()) + "}"


def case(series: Sequence[Mapping[str, str]], **tests: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One promtool unit test: input series of a step of STEP_S, and what is expected of them."""
    return {"interval": f"{STEP_S}s", "input_series": list(series), **tests}


def alert_case(
    alert: str, series: Sequence[Mapping[str, str]], expected: Sequence[Mapping[str, Any]], at: str = "10m"
) -> dict[str, Any]:
    """The alerts of this name that fire at `at`."""
    wanted = {"eval_time": at, "alertname": alert, "exp_alerts": list(expected)}
    return case(series, alert_rule_test=[wanted])


def rule_test(rules: Path, folder: Path, *cases: Mapping[str, Any]) -> None:
    """Run them all in one promtool, which takes a second to start on a busy machine."""
    body = {"rule_files": [str(rules)], "evaluation_interval": f"{STEP_S}s", "tests": list(cases)}
    path = folder / "test.yml"
    path.write_text(yaml.safe_dump(body), encoding="utf-8")
    done = promtool("test", "rules", str(path))
    assert done.returncode == 0, done.stdout + done.stderr


def alerts_of(rules: Path, group: str) -> set[str]:
    """Names of the alerts of one group."""
    [found] = [one for one in yaml.safe_load(rules.read_text())["groups"] if one["name"] == group]
    return {row["alert"] for row in found["rules"] if "alert" in row}


def lacking_cases(alerts: set[str], cases: Mapping[str, tuple[Any, ...]]) -> list[str]:
    """Alerts without a case in which they fire, one in which they don't, and one in which data is missing."""
    named = {alert: [name for name, case in cases.items() if case[0] == alert] for alert in alerts}
    words = ("fires", "silent", "missing")
    return [
        alert for alert, names in named.items() if not all(any(w in name for name in names) for w in words)
    ]
