"""`weir setup` and `weir doctor`: what a person and a script see."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from mesh import doctor, tools, tools_cli, tools_fetch
from mesh.doctor import State
from mesh.tools import TOOLS, Bundle
from regions.cli.errors import WeirError

CLI = CliRunner()


def app() -> typer.Typer:
    made = typer.Typer()
    tools_cli.register(made)
    return made


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with Consul alone on PATH; returns the folder on PATH."""
    monkeypatch.setattr(tools, "EXTRA_PATH", ())
    folder = tmp_path / "bin"
    folder.mkdir()
    put(folder, "consul", "Consul v1.8.7")
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for spec in TOOLS.values():
        monkeypatch.delenv(spec.override, raising=False)
    return folder


def put(folder: Path, name: str, says: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o755)


def no_mirror(bundles: list[Bundle], *_: object) -> None:
    raise WeirError("packages", f"no mirror for {bundles[0].name}", "check the network")


def test_setup_prints_paths_and_warns_of_what_weir_can_do_without(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tools_fetch, "fetch", no_mirror)
    got = CLI.invoke(app(), ["setup"])
    assert got.exit_code == 0
    assert f"consul      {bare}/consul" in got.stdout
    assert "going on without packages: no mirror for iptables" in got.stderr


def test_setup_quiet_says_nothing_when_nothing_is_to_be_done(bare: Path) -> None:
    put(bare, "iptables-legacy", "iptables v1.8.9 (legacy)")
    got = CLI.invoke(app(), ["setup", "--quiet"])
    assert (got.exit_code, got.output) == (0, "")


def test_setup_fails_when_something_asked_for_by_name_cannot_be_had(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tools_fetch, "fetch", no_mirror)
    got = CLI.invoke(app(), ["setup", "prometheus"])
    assert isinstance(got.exception, WeirError)
    assert "no mirror for prometheus" in str(got.exception)


def test_setup_for_tests_goes_on_without_terraform(bare: Path) -> None:
    for name in ("iptables-legacy", "prometheus", "promtool"):
        put(bare, name, "v9.9.9")
    got = CLI.invoke(app(), ["setup", "--dev", "--json"])
    assert got.exit_code == 0
    assert set(json.loads(got.stdout)["tools"]) == {"consul", "envoy", "iptables", "prometheus", "promtool"}
    assert "going on without terraform" in got.stderr


def test_setup_of_an_unknown_tool_names_the_known(bare: Path) -> None:
    got = CLI.invoke(app(), ["setup", "nomad"])
    assert isinstance(got.exception, WeirError)
    assert got.exception.exit_code == 2
    assert "promtool" in got.exception.way_out


def test_doctor_gives_every_failure_a_fix(bare: Path) -> None:
    (bare / "consul").unlink()
    got = CLI.invoke(app(), ["doctor", "--json"])
    body = json.loads(got.stdout)
    assert got.exit_code == 1
    assert body["schema_version"] == 1
    assert body["fit"] is False
    checks = {c["name"]: c for c in body["checks"]}
    assert checks["consul"]["state"] == "fail"
    assert "make setup" in checks["consul"]["fix"]
    assert checks["prometheus"]["state"] == "warn"
    for check in body["checks"]:
        assert bool(check["fix"]) == (check["state"] != "ok"), check


def test_doctor_for_people_puts_the_fix_below_the_failure(bare: Path) -> None:
    lines = CLI.invoke(app(), ["doctor"]).stdout.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("warn  prometheus"))
    assert "fix: " in lines[at + 1]


@pytest.mark.parametrize(
    ("version", "state"), [((3, 10, 14), State.FAIL), ((3, 11, 0), State.OK), ((3, 13, 1), State.OK)]
)
def test_python_is_judged_by_its_first_two_numbers(version: tuple[int, ...], state: State) -> None:
    assert doctor.python_version(version).state is state


@pytest.mark.parametrize(("megabytes", "state"), [(100, State.FAIL), (1000, State.WARN), (50_000, State.OK)])
def test_disk(megabytes: float, state: State) -> None:
    assert doctor.disk(Path("/x"), megabytes).state is state


@pytest.mark.parametrize(
    ("tool", "line", "state", "said"),
    [
        ("consul", "Consul v1.8.7", State.OK, "1.8.7"),
        ("consul", "Consul v1.21.0", State.OK, "1.21.0"),
        ("consul", "Consul v1.7.9", State.FAIL, "too old"),
        ("envoy", "/py3.11/envoy  version: 9e55/1.40.0/Clean/RELEASE/BoringSSL", State.OK, "1.40.0"),
        ("envoy", "/py3.11/envoy  version: 9e55/1.35.9/Clean/RELEASE/BoringSSL", State.FAIL, "too old"),
        ("terraform", "Terraform v1.5.7", State.WARN, "too old"),
        ("terraform", "OpenTofu v1.9.0", State.OK, "1.9.0"),
        ("promtool", "what?", State.WARN, "no version"),
    ],
)
def test_versions(tool: str, line: str, state: State, said: str) -> None:
    check = doctor.tool_version(TOOLS[tool], Path("/py3.11/envoy"), line)
    assert check.state is state
    assert said in check.detail
    assert bool(check.fix) == (state is not State.OK)


def test_a_tool_that_does_not_start_is_told_from_one_that_is_missing(bare: Path) -> None:
    (bare / "consul").write_text("#!/bin/sh\nexit 3\n")
    check = doctor.tool(TOOLS["consul"], os.environ)
    assert check.state is State.FAIL
    assert "doesn't start" in check.detail
    assert "WEIR_CONSUL" in check.fix
