"""The plan of a world and `weir executor` agree on the flags, without starting anything."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

from mesh.world.engines import ENGINES, check_words
from mesh.world.layout import RegionLayout, WorldLayout
from mesh.world.plan import Programs, processes, proxies
from mesh.world.spec import WorldSpec
from regions.cli.errors import UsageError
from regions.load import default_dir, load_regions
from services.cli import register
from services.options import MEMORY, MESH, MODEL, QUEUE, SECOND, WHO, Told

FIXED = {"--instance": "i", "--region": "r", "--listen": "127.0.0.1:1", "--engine": "sim"}
NONSENSE = [
    ({"--stage": "gamma"}, "--stage 'gamma'"),
    ({"--instance": ""}, "--instance ''"),
    ({"--instance": "../x y"}, "--instance '../x y'"),
    ({"--devices": "gpu"}, "--devices 'gpu'"),
    ({"--devices": "fake:7:0"}, "--devices 'fake:7:0'"),
    ({"--devices": "fake:7:3:1"}, "--devices 'fake:7:3:1'"),
    ({"--tenant-class": "platinum"}, "--tenant-class 'platinum'"),
    ({"--listen": "nonsense"}, "--listen 'nonsense'"),
    ({"--admin": "0.0.0.0:1"}, "--admin '0.0.0.0:1': not on loopback"),
    ({"--fallback-option": "a=b"}, "--fallback-option"),
    ({"--fallback-rules": "/nope"}, "--fallback-rules"),
    ({"--fallback": "layerwise"}, "--fallback layerwise"),
    ({"--fallback": "none"}, "engine 'none'"),
    ({"--fallback": "sim", "--fallback-option": "bla=1"}, "engine option 'bla'"),
    ({"--option": "bla"}, "--option 'bla'"),
    ({"--option": "bla=1"}, "engine option 'bla'"),
    ({"--option": "speed=nan"}, "engine option speed='nan'"),
    ({"--engine": "torch"}, "--model: is needed"),
    ({"--engine": "openai", "--option": "base_url=http://127.0.0.1:1"}, "--model: is needed"),
    ({"--engine": "torch", "--model": "nope"}, "model 'nope'"),
    ({"--engine": "gpt"}, "engine 'gpt'"),
    ({"--consul": "http://127.0.0.1:8500"}, "--consul: needs --sidecar"),
]


def _check(flags: dict[str, str]) -> None:
    app = typer.Typer()
    app.callback()(lambda: None)
    register(app)
    words = [word for pair in (FIXED | flags).items() for word in pair]
    assert CliRunner().invoke(app, ["executor", "--check", *words], catch_exceptions=False).exit_code == 0


@pytest.mark.parametrize(("flags", "named"), NONSENSE)
def test_nonsense_is_named_with_a_way_out_before_anything_starts(flags: dict[str, str], named: str) -> None:
    with pytest.raises(UsageError) as caught:
        _check(flags)
    assert str(caught.value).startswith(named)
    assert caught.value.way_out


@pytest.mark.parametrize("engine", ["echo", "sim"])
def test_what_a_world_asks_before_it_starts_is_a_command_line_that_is_understood(engine: str) -> None:
    words = check_words(engine, "", ("slots=4",), ("pool.busy=0.9",))
    _check(dict(zip(words[2::2], words[3::2], strict=True)))
    with pytest.raises(UsageError, match="bla"):
        _check({"--engine": engine, "--model": ENGINES[engine].model, "--option": "bla=1"})
    with pytest.raises(UsageError, match="bla"):
        _check({"--engine": engine, "--model": ENGINES[engine].model, "--set": "pool.bla=1"})


def test_the_world_starts_it_with_flags_it_knows() -> None:
    spec = WorldSpec(42, load_regions(default_dir()), services_dir="x", intentions_file="y")
    layout = WorldLayout(Path("/w/.weir"), Path("/run/weir-x"))
    app = typer.Typer()
    app.callback()(lambda: None)
    register(app)
    command = typer.main.get_command(app).commands["executor"]  # type: ignore[attr-defined]
    for name in spec.regions.names:
        sums = {proxy.id: "ab" * 32 for proxy in proxies(spec, name)}
        plans = processes(spec, RegionLayout(layout, name), Programs("c", "e", ("weir",)), sums)
        argvs = [plan.argv[2:] for plan in plans if plan.argv[:2] == ("weir", "executor")]
        assert len(argvs) == len(spec.members(name)) > 0
        for argv in argvs:
            context = command.make_context("executor", list(argv))
            assert context.params["region"] == name
            assert context.params["xds_token_sha256"] == "ab" * 32


def test_its_help_has_every_option_in_a_group() -> None:
    app = typer.Typer(rich_markup_mode=None)
    app.callback()(lambda: None)
    register(app)
    text = CliRunner().invoke(app, ["executor", "--help"]).stdout
    groups = {part.split("\n", 1)[0].rstrip(":"): part for part in text.split("\n\n") if "  --" in part}
    assert list(groups) == [WHO, MODEL, SECOND, QUEUE, MESH, MEMORY, "Other"]
    for name in {field.name for field in fields(Told)} - {"given", "tune"} | {"set"}:
        assert f"--{name.replace('_', '-')}" in text
    assert "--max-delay-ms" in groups[QUEUE]
