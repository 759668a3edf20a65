"""mesh.tools: the order in which a program is looked for, and what is said when it is nowhere."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from mesh import tools
from mesh.tools import BUNDLES, TOOLS, cache_dir, find, library_env, look, run_env, tree
from regions.cli.errors import WeirError


def program(path: Path, text: str = "#!/bin/sh\necho v1.2.3\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An empty machine: nothing on PATH, an empty cache, no system folders beside PATH."""
    monkeypatch.setattr(tools, "EXTRA_PATH", ())
    return {"PATH": str(tmp_path / "bin"), "XDG_CACHE_HOME": str(tmp_path / "cache"), "HOME": str(tmp_path)}


def test_override_wins_over_path_and_path_over_cache(env: dict[str, str], tmp_path: Path) -> None:
    cached = program(tree("consul", env) / "usr/bin/consul")
    assert find("consul", env) == cached
    on_path = program(tmp_path / "bin" / "consul")
    assert find("consul", env) == on_path
    own = program(tmp_path / "own consul")
    assert find("consul", env | {"WEIR_CONSUL": str(own)}) == own


def test_a_wrong_override_is_an_error_even_when_the_tool_is_elsewhere(
    env: dict[str, str], tmp_path: Path
) -> None:
    program(tmp_path / "bin" / "consul")
    with pytest.raises(WeirError, match="WEIR_CONSUL: names '/nowhere/consul'"):
        find("consul", env | {"WEIR_CONSUL": "/nowhere/consul"})


@pytest.mark.parametrize("name", [n for n in TOOLS if n != "envoy"])
def test_what_is_nowhere_is_named_with_a_way_out(env: dict[str, str], name: str) -> None:
    with pytest.raises(WeirError) as caught:
        find(name, env)
    assert caught.value.what == name
    assert TOOLS[name].needed_for in caught.value.why
    assert f"WEIR_{name.upper()}" in caught.value.way_out


def test_a_file_that_cannot_be_run_is_no_tool(env: dict[str, str]) -> None:
    program(tree("consul", env) / "usr/bin/consul").chmod(0o644)
    assert look(TOOLS["consul"], env) is None


def test_tofu_stands_in_for_terraform(env: dict[str, str], tmp_path: Path) -> None:
    tofu = program(tmp_path / "bin" / "tofu")
    assert find("terraform", env) == tofu
    terraform = program(tmp_path / "bin" / "terraform")
    assert find("terraform", env) == terraform


def test_envoy_is_the_binary_in_the_package_not_the_script_on_path(
    env: dict[str, str], tmp_path: Path
) -> None:
    program(tmp_path / "bin" / "envoy")
    found = find("envoy", env)
    assert found.parts[-3:] == ("envoy", "_bin", "envoy")
    with found.open("rb") as binary:
        assert binary.read(4) == b"\x7fELF"


def test_envoy_on_path_serves_where_the_package_is_not_installed(
    env: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(tools, "distribution", gone)
    assert look(TOOLS["envoy"], env) is None
    with pytest.raises(WeirError, match="make setup"):
        find("envoy", env)
    assert find("envoy", env | {"PATH": str(program(tmp_path / "bin" / "envoy").parent)}).name == "envoy"


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"XDG_CACHE_HOME": "/c", "HOME": "/h"}, "/c/weir"),
        ({"HOME": "/h"}, "/h/.cache/weir"),
        ({"XDG_CACHE_HOME": "", "HOME": "/h"}, "/h/.cache/weir"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/h"}, "/h/.cache/weir"),
    ],
)
def test_cache_follows_the_xdg_rules(environ: dict[str, str], expected: str) -> None:
    assert cache_dir(environ) == Path(expected)


def test_a_tool_of_the_cache_runs_with_its_own_libraries(env: dict[str, str]) -> None:
    program(tree("iptables", env) / "usr/sbin/iptables-legacy")
    libraries = tree("iptables", env) / "usr/lib/x86_64-linux-gnu"
    (libraries / "xtables").mkdir(parents=True)
    got = run_env("iptables", env | {"LD_LIBRARY_PATH": "/mine", "KEEP": "1"})
    assert got["LD_LIBRARY_PATH"] == f"{libraries}{os.pathsep}/mine"
    assert got["XTABLES_LIBDIR"] == str(libraries / "xtables")
    assert got["KEEP"] == "1"


def test_a_tool_of_the_system_runs_as_it_is(env: dict[str, str], tmp_path: Path) -> None:
    program(tmp_path / "bin" / "consul")
    (tree("consul", env) / "usr/lib/x86_64-linux-gnu").mkdir(parents=True)
    assert run_env("consul", env) == env


def test_a_tree_without_libraries_adds_nothing(tmp_path: Path) -> None:
    assert library_env(tmp_path, {"LD_LIBRARY_PATH": "/mine"}) == {}


def test_terraform_is_spared_a_settings_file_that_is_not_there(env: dict[str, str], tmp_path: Path) -> None:
    assert "TF_CLI_CONFIG_FILE" not in run_env("terraform", env | {"TF_CLI_CONFIG_FILE": "/nowhere/rc"})
    there = tmp_path / "rc"
    there.touch()
    kept = run_env("terraform", env | {"TF_CLI_CONFIG_FILE": str(there)})
    assert kept["TF_CLI_CONFIG_FILE"] == str(there)


def test_tables_agree_with_each_other() -> None:
    for name, spec in TOOLS.items():
        assert spec.name == name
        assert bool(spec.bundle) == bool(spec.inside)
        assert not spec.bundle or spec.bundle in BUNDLES
    assert {spec.bundle for spec in TOOLS.values() if spec.bundle} == set(BUNDLES)
