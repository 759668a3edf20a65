"""`weir`: the root command, put together from the rooms by entry points.

Law: imports no room. A room registers its commands through the entry-point group `weir.commands`
(pyproject.toml); here they are loaded in name order, and errors become exit codes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import cast

import typer
from rich.markup import escape

from regions.cli.errors import Exit, WeirError
from regions.cli.output import talk

HELP = """Multi-region model serving on a Consul Connect mesh.

Describe regions, services and intentions as data; change one key in Consul KV and watch coloured
traffic move; run failover drills that break things for real, heal them and leave evidence.

Start with: weir up, weir status, weir traffic show, weir drill list.
"""


def build(asked: str = "") -> typer.Typer:
    """Collect every room's commands into one application; of a quick command only its own room.

    asked: the first word of the command line. A world starts a dozen processes on a few cores, and loading
    every room's command line takes each of them longer than its own start.
    """
    app = typer.Typer(
        name="weir", help=HELP, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None
    )
    quick = [point for point in entry_points(group="weir.quick") if point.name == asked]
    if quick:
        app.callback()(_only)  # one command alone would otherwise become the application itself
    for point in quick or sorted(entry_points(group="weir.commands"), key=lambda p: p.name):
        register = cast("Callable[[typer.Typer], None]", point.load())
        register(app)
    return app


def _only() -> None:
    """Multi-region model serving on a Consul Connect mesh."""


def main() -> None:
    """Entry point of the `weir` command. Exit codes: see regions.cli.errors.Exit."""
    try:
        build(sys.argv[1] if len(sys.argv) > 1 else "")(standalone_mode=True)
    except WeirError as error:
        talk().print(f"[bold red]error[/] {escape(str(error))}", soft_wrap=True, markup=True)
        sys.exit(int(error.exit_code))
    except KeyboardInterrupt:
        talk().print("interrupted")
        sys.exit(int(Exit.INTERRUPTED))
