"""`weir drill list | run | report | heal` and `weir demo`.

Law: parses, hands over, prints. Verdicts become exit codes: 0 pass, 1 fail, 3 unknown, 4 refused, 130
interrupted. The room's own parts are imported inside, so that `weir --help` stays fast.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from regions.cli.errors import Refused, UsageError
from regions.cli.output import emit_json, table, talk

Folder = Annotated[
    Path, typer.Option("--dir", "--world", envvar="WEIR_DIR", help="Folder of the world's state.")
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]

drill_app = typer.Typer(help="Break things on purpose, heal them, keep the evidence.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Entry point of the group `weir.commands`."""
    app.add_typer(drill_app, name="drill")
    app.command("demo", help="The story in three minutes: regions, a canary, a region lost and healed.")(demo)


def demo(
    as_json: Annotated[bool, typer.Option("--json", help="The drill's JSON on stdout.")] = False,
    instances: Annotated[int | None, typer.Option(help="Stable instances per region (2).")] = None,
) -> None:
    """Up, a canary by one key, a region lost under load, report, down."""
    from drills.demo import demo as tell

    raise typer.Exit(int(tell(instances, as_json=as_json)))


@drill_app.command("list")
def list_(folder: Folder = Path(".weir"), as_json: AsJson = False) -> None:
    """Drills that can be run, the one that runs now, the latest reports."""
    import asyncio

    from drills import scenario_file, session
    from drills.show import catalogue
    from drills.store import Store
    from mesh.world.world import NoWorld, World

    drafts = [scenario_file.read(name) for name in scenario_file.names()]
    store = Store(folder)
    recent = [store.load(id_) for id_ in store.ids()[-5:]]
    try:
        now = asyncio.run(session.running(World.load(folder)))
    except NoWorld:
        now = None
    if as_json:
        drills = [{"drill": d.name, "title": d.file.title, "modes": list(d.modes)} for d in drafts]
        emit_json({"drills": drills, "running": now, "reports": list(store.ids())})
        return
    table().print(catalogue(drafts, now, recent))


@drill_app.command("run")
def run(
    name: Annotated[str, typer.Argument(help="Drill name (see `weir drill list`) or a .yaml file.")],
    folder: Folder = Path(".weir"),
    settings: Annotated[list[str] | None, typer.Option("--set", help="NAME=VALUE; may be repeated.")] = None,
    region: Annotated[str, typer.Option(help="Region the drill is about (default: the primary).")] = "",
    duration: Annotated[str, typer.Option(help="Seconds the fault stays.")] = "",
    rate: Annotated[
        str, typer.Option(help="Requests per second, whatever the service is declared for.")
    ] = "",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask before breaking things.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would happen, do nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run one drill: gate, load, fault, healing, report. Ctrl-C heals and still reports."""
    import asyncio

    from drills import session, show
    from drills.talk import Talk
    from mesh.clock import SystemClock
    from mesh.world.world import World

    world = World.load(folder)
    chosen = _settings(settings or [])
    chosen |= {name: text for name, text in (("duration", duration), ("rate", rate)) if text}
    ask = session.Ask(name, chosen, region, "weir " + " ".join(sys.argv[1:]))
    console = talk()
    console.print(show.plan(session.scenario_of(world, ask)), soft_wrap=True, markup=False)
    if dry_run:
        return
    _confirm(yes)
    with Talk(console, SystemClock()) as progress:
        made, body = asyncio.run(session.run(world, ask, progress))
    _tell(body, as_json)
    for command in made.outcome.by_hand:
        console.print(f"left to do by hand: {command}", soft_wrap=True, markup=False)
    raise typer.Exit(int(session.exit_code(body)))


@drill_app.command("report")
def report(
    which: Annotated[str, typer.Argument(help="Id of a drill, its beginning, or `latest`.")] = "latest",
    folder: Folder = Path(".weir"),
    as_json: AsJson = False,
) -> None:
    """Show a report again; the page's path stands in its last line."""
    from drills.store import Store

    _tell(Store(folder.absolute()).load(which), as_json)


@drill_app.command("heal")
def heal(folder: Folder = Path(".weir")) -> None:
    """Undo what a drill left that was killed before it could heal; fine when there is nothing."""
    import asyncio

    from drills import session
    from drills.talk import Talk
    from mesh.clock import SystemClock
    from mesh.world.world import World

    console = talk()
    with Talk(console, SystemClock()) as progress:
        did = asyncio.run(session.heal(World.load(folder), progress))
    console.print("healed" if did else "nothing to heal")


def _settings(pairs: list[str]) -> dict[str, str]:
    """`NAME=VALUE` texts as a mapping. Raises UsageError."""
    found: dict[str, str] = {}
    for pair in pairs:
        key, sign, value = pair.partition("=")
        if not sign or not key or not value:
            raise UsageError(f"--set {pair}", "not of the form NAME=VALUE", "for instance --set rate=100")
        found[key.strip()] = value.strip()
    return found


def _confirm(yes: bool) -> None:
    """Ask a person; a script that calls has decided already."""
    if yes or not sys.stdin.isatty():
        return
    if not typer.confirm("break it?", err=True):
        raise Refused("drill", "not confirmed", "answer y, or give --yes")


def _tell(body: dict[str, Any], as_json: bool) -> None:
    from drills.show import summary

    if as_json:
        emit_json({k: v for k, v in body.items() if k != "schema_version"})
    else:
        table().print(summary(body))
