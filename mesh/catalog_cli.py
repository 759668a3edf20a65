"""`weir services list | validate`: the service catalog.

Law: arguments in, `mesh.catalog` asked, words and exit codes out.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from mesh.catalog import default_dir, load_services
from regions.cli.errors import Exit
from regions.cli.output import emit_json, table, talk
from regions.yamlfile import DataFileError, shown

DirOption = Annotated[
    Path | None,
    typer.Option(
        "--dir", help="Folder with the service files. Default: ./services/catalog, else weir's own."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]

app = typer.Typer(no_args_is_help=True, help="The services behind the ingress: one YAML file each.")


def register(root: typer.Typer) -> None:
    """Entry point `15_services_catalog` of the group weir.commands."""
    root.add_typer(app, name="services")


@app.command("list")
def list_(folder: DirOption = None, as_json: JsonOption = False) -> None:
    """All services as their owners describe them."""
    specs = load_services(folder or default_dir())
    if as_json:
        emit_json({"services": [asdict(spec) for spec in specs]})
        return
    grid = Table("service", "prefix", "capacity/instance", "first byte", "idle", "rate limit", box=None)
    for spec in specs:
        limit = f"{spec.rate_limit.requests_per_second}/s, burst {spec.rate_limit.burst}"
        first, idle = f"{spec.first_byte_timeout_s:g} s", f"{spec.idle_timeout_s:g} s"
        grid.add_row(spec.name, spec.prefix, f"{spec.capacity_rps:g}/s", first, idle, limit)
    table().print(grid)


@app.command("validate")
def validate(folder: DirOption = None, as_json: JsonOption = False) -> None:
    """Check every service file. Exit 0: good, 2: problems, each with file, line and field."""
    where = folder or default_dir()
    try:
        names = [spec.name for spec in load_services(where)]
    except DataFileError as error:
        if not as_json:
            raise
        emit_json({"valid": False, "services": [], "problems": [asdict(p) for p in error.problems]})
        raise typer.Exit(int(Exit.USAGE)) from None
    if as_json:
        emit_json({"valid": True, "services": names, "problems": []})
    else:
        talk().print(f"{shown(where)}: {len(names)} services, no problem: {', '.join(names)}", markup=False)
