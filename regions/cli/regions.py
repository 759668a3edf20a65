"""`weir regions list | show | validate | schema`.

Law: arguments in, `regions.load` asked, words and exit codes out.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from regions.cli.errors import Exit, UsageError
from regions.cli.output import emit_json, table, talk
from regions.load import default_dir, json_schema, load_regions
from regions.model import Region
from regions.yamlfile import DataFileError, shown

DirOption = Annotated[
    Path | None,
    typer.Option("--dir", help="Folder with the region files. Default: ./regions, else weir's own."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]

app = typer.Typer(no_args_is_help=True, help="The regions of the mesh: one YAML file each.")


def register(root: typer.Typer) -> None:
    """Entry point `10_regions` of the group weir.commands."""
    root.add_typer(app, name="regions")


@app.command("list")
def list_(folder: DirOption = None, as_json: JsonOption = False) -> None:
    """All regions with their share of the traffic when Consul KV says nothing."""
    rows = load_regions(folder or default_dir())
    total = sum(r.weight for r in rows.regions)
    if as_json:
        emit_json({"regions": [_body(r, total) for r in rows.regions]})
        return
    grid = Table("region", "cloud", "zones", "share", "failover", "primary", box=None)
    for row in rows.regions:
        share, primary = f"{row.weight / total:.1%}", "yes" if row.primary else ""
        zones, failover = ", ".join(row.zones), ", ".join(row.failover)
        grid.add_row(row.name, row.cloud.value, zones, share, failover, primary)
    table().print(grid)


@app.command("show")
def show(name: str, folder: DirOption = None, as_json: JsonOption = False) -> None:
    """Everything about one region."""
    rows = load_regions(folder or default_dir())
    row = rows.get(name)
    if row is None:
        raise UsageError(f"region {name!r}", "unknown", f"name one of: {', '.join(rows.names)}")
    body = _body(row, sum(r.weight for r in rows.regions))
    if as_json:
        emit_json(body)
        return
    for key, value in body.items():
        table().print(
            f"{key}: {json.dumps(value) if isinstance(value, dict) else _plain(value)}", markup=False
        )


@app.command("validate")
def validate(folder: DirOption = None, as_json: JsonOption = False) -> None:
    """Check every region file. Exit 0: good, 2: problems, each with file, line and field."""
    where = folder or default_dir()
    try:
        names = load_regions(where).names
    except DataFileError as error:
        if not as_json:
            raise
        emit_json({"valid": False, "regions": [], "problems": [asdict(p) for p in error.problems]})
        raise typer.Exit(int(Exit.USAGE)) from None
    if as_json:
        emit_json({"valid": True, "regions": list(names), "problems": []})
    else:
        talk().print(f"{shown(where)}: {len(names)} regions, no problem: {', '.join(names)}", markup=False)


@app.command("schema")
def schema() -> None:
    """JSON Schema of a region file, for editors and other tools."""
    sys.stdout.write(json.dumps(json_schema(), indent=2) + "\n")


def _body(row: Region, total: float) -> dict[str, Any]:
    return {
        "name": row.name,
        "cloud": row.cloud.value,
        "primary": row.primary,
        "zones": list(row.zones),
        "failover": list(row.failover),
        "weight": row.weight,
        "share": row.weight / total,
        "gateways": {"ingress": row.gateways.ingress, "mesh": row.gateways.mesh},
        "network": row.network,
    }


def _plain(value: Any) -> str:
    return ", ".join(value) if isinstance(value, list) else str(value)
