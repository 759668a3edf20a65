"""`weir setup` and `weir doctor`.

Law: commands only; finding, fetching and judging live in mesh.tools, mesh.tools_fetch, mesh.doctor.
`python -m mesh.tools_cli` runs these two alone, so that set-up works while other rooms can't be
imported, and costs no more than it must.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from mesh import tools
from mesh.tools import TOOLS
from regions.cli.errors import Exit, UsageError, WeirError
from regions.cli.output import emit_json, talk

REQUIRED = ("consul", "envoy")
FOR_TESTS = ("iptables", "prometheus", "promtool")
# Without these weir runs, and what needs them says so. Terraform is in no Debian release.
OPTIONAL = ("iptables",)
OPTIONAL_FOR_TESTS = ("terraform",)

Names = Annotated[
    list[str] | None,
    typer.Argument(metavar="[TOOL]...", help="Only these: " + ", ".join(TOOLS), show_default=False),
]


def register(app: typer.Typer) -> None:
    """Hand the commands to the root."""
    app.command("setup")(setup)
    app.command("doctor")(doctor)


def setup(
    names: Names = None,
    dev: Annotated[bool, typer.Option("--dev", help="Also what the tests need.")] = False,
    extra: Annotated[
        list[str] | None, typer.Option("--with", help="Also these Python packages: torch, vllm.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Say nothing when nothing is to be done.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The paths as one JSON object.")] = False,
) -> None:
    """Fetch the programs weir runs (Consul and so on) into the user's cache. Needs no root."""
    required = tuple(names or ()) or (REQUIRED + FOR_TESTS if dev else REQUIRED)
    if unknown := sorted(set(required) - set(TOOLS)):
        raise UsageError("weir setup", f"unknown tool {', '.join(unknown)}", "known are " + ", ".join(TOOLS))
    optional = () if names else OPTIONAL_FOR_TESTS if dev else OPTIONAL
    _fetch(required)
    paths = {name: tools.find(name) for name in required}
    _fetch_if_possible(optional)
    for name in extra or ():
        _install(name)
    if as_json:
        emit_json({"tools": {name: str(path) for name, path in paths.items()}})
    elif not quiet:
        for name, path in paths.items():
            typer.echo(f"{name:<11} {path}")


def _fetch(names: tuple[str, ...]) -> None:
    # Imported late: a set-up with nothing to do should not pay for subprocess and friends.
    from mesh import tools_fetch

    if bundles := tools_fetch.missing(names, os.environ):
        console = talk()
        tools_fetch.fetch(bundles, os.environ, lambda line: console.print(line, markup=False, soft_wrap=True))


def _install(name: str) -> None:
    from mesh import extras

    console = talk()
    extras.install(name, lambda line: console.print(line, markup=False, soft_wrap=True))


def _fetch_if_possible(names: tuple[str, ...]) -> None:
    """The same for what weir can do without: what stays missing is told, with what is lost, not raised."""
    for name in names:
        try:
            _fetch((name,))
            tools.find(name)
        except WeirError as error:
            talk().print(f"warning: going on without {error}", markup=False, soft_wrap=True)


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="The checks as one JSON object.")] = False,
) -> None:
    """Check whether this machine can run weir; every failure names its fix. Exit code 1 when it can't."""
    from mesh.doctor import State, examine

    checks = examine(Path.cwd(), os.environ)
    fit = all(check.state is not State.FAIL for check in checks)
    if as_json:
        rows = [{"name": c.name, "state": c.state.value, "detail": c.detail, "fix": c.fix} for c in checks]
        emit_json({"fit": fit, "checks": rows})
    else:
        for check in checks:
            typer.echo(f"{check.state.value:<5} {check.name:<14} {check.detail}")
            if check.fix:
                typer.echo(f"      {'':<14} fix: {check.fix}")
    raise typer.Exit(int(Exit.DONE if fit else Exit.FAILED))


def main() -> None:
    """Entry point of `python -m mesh.tools_cli`: these commands without the other rooms."""
    app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)
    register(app)
    try:
        app()
    except WeirError as error:
        talk().print(f"error: {error}", markup=False, soft_wrap=True)
        sys.exit(int(error.exit_code))


if __name__ == "__main__":
    main()
