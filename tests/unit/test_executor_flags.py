"""The plan of a world and `weir executor` agree on the flags, without starting anything."""

from __future__ import annotations

from pathlib import Path

import typer.main

from mesh.world.layout import RegionLayout, WorldLayout
from mesh.world.plan import Programs, processes, proxies
from mesh.world.spec import WorldSpec
from regions.load import default_dir, load_regions
from services.cli import register


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
