"""`weir regions` and `weir services`: exit codes, JSON on stdout, errors as WeirError."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from mesh import catalog_cli
from mesh.consul import intentions_cli
from mesh.world.consul_config import ConsulSecrets
from mesh.world.layout import WorldLayout
from mesh.world.spec import WorldSpec
from mesh.world.world import save_description
from regions.cli import regions
from regions.cli.errors import UsageError
from regions.load import load_regions
from regions.yamlfile import DataFileError

ROOT = Path(__file__).parents[2]


def weir(*args: str) -> tuple[int, str]:
    app = typer.Typer()
    for room in (regions, catalog_cli, intentions_cli):
        room.register(app)
    result = CliRunner().invoke(app, args)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout


def test_list_and_show() -> None:
    code, text = weir("regions", "list", "--dir", str(ROOT / "regions"), "--json")
    body = json.loads(text)
    assert (code, body["schema_version"]) == (0, 1)
    assert sum(r["share"] for r in body["regions"]) == pytest.approx(1)
    code, text = weir("regions", "show", "westeurope", "--dir", str(ROOT / "regions"), "--json")
    assert (code, json.loads(text)["cloud"]) == (0, "azure")
    assert "cn-north-1a" in weir("regions", "list", "--dir", str(ROOT / "regions"))[1]


def test_an_unknown_region_names_the_known_ones() -> None:
    with pytest.raises(UsageError, match="westeurope") as caught:
        weir("regions", "show", "nowhere", "--dir", str(ROOT / "regions"))
    assert "cn-north-1" in caught.value.way_out


def test_validate_tells_problems_as_text_and_as_data(tmp_path: Path) -> None:
    (tmp_path / "eu.yaml").write_text("name: eu\n")
    with pytest.raises(DataFileError, match=r"eu\.yaml:1: cloud: missing"):
        weir("regions", "validate", "--dir", str(tmp_path))
    code, text = weir("regions", "validate", "--dir", str(tmp_path), "--json")
    body = json.loads(text)
    assert (code, body["valid"]) == (2, False)
    assert {p["field"] for p in body["problems"]} == {"cloud", "zones", "failover", "weight"}
    assert weir("regions", "validate", "--dir", str(ROOT / "regions"))[0] == 0


def test_the_local_folder_wins_when_it_has_regions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "regions").mkdir()
    assert len(json.loads(weir("regions", "list", "--json")[1])["regions"]) == 3
    (tmp_path / "regions" / "eu.yaml").write_text(
        "{name: eu, cloud: local, zones: [a], failover: [], weight: 1, primary: true}\n"
    )
    assert [r["name"] for r in json.loads(weir("regions", "list", "--json")[1])["regions"]] == ["eu"]


def test_services(tmp_path: Path) -> None:
    folder = str(ROOT / "services" / "catalog")
    code, text = weir("services", "list", "--dir", folder, "--json")
    assert (code, json.loads(text)["services"][0]["prefix"]) == (0, "/chat")
    assert json.loads(weir("services", "validate", "--dir", folder, "--json")[1])["valid"] is True
    (tmp_path / "a.yaml").write_text("name: a\n")
    assert weir("services", "validate", "--dir", str(tmp_path), "--json")[0] == 2


def test_intentions_without_consul(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CONSUL_HTTP_ADDR", raising=False)
    folder = str(ROOT / "intentions")
    assert weir("intentions", "check", "ingress-gateway", "chat", "--catalog", "--dir", folder)[0] == 0
    code, text = weir("intentions", "check", "web", "chat", "--catalog", "--dir", folder, "--json")
    assert (code, json.loads(text)["allowed"]) == (1, False)
    with pytest.raises(UsageError, match="no agent named") as caught:
        weir("intentions", "list")
    assert "--catalog" in caught.value.way_out
    with pytest.raises(UsageError, match="not a service name"):
        weir("intentions", "check", "*", "chat", "--catalog", "--dir", folder)


def test_the_worlds_primary_is_asked_when_no_agent_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("CONSUL_HTTP_ADDR", "CONSUL_HTTP_TOKEN", "CONSUL_HTTP_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    world = WorldLayout(tmp_path / ".weir", tmp_path / "run")
    world.folder.mkdir()
    spec = WorldSpec(number=101, regions=load_regions(ROOT / "regions"), services_dir="", acl=True)
    save_description(world, spec)
    secrets = ConsulSecrets(gossip="g", management="m", roles={"operator": "of-the-world"})
    world.secrets.write_text(json.dumps(asdict(secrets)))
    agent = intentions_cli._agent("")
    assert agent.address == spec.addresses("cn-north-1").consul_http
    assert agent._headers == {"X-Consul-Token": "of-the-world"}
    monkeypatch.setenv("CONSUL_HTTP_TOKEN", "my-own")
    assert intentions_cli._agent("")._headers == {"X-Consul-Token": "my-own"}
