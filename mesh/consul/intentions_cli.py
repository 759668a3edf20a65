"""`weir intentions list | plan | apply | check`.

Law: arguments in, one call to the door or the catalog, words and exit codes out; no rule is decided here. It
stands in mesh/ and not in intentions/, because that room knows no Consul.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.table import Table

from intentions.load import default_file, is_service_name, load_intentions
from intentions.model import Intention
from intentions.plan import IntentionPlan, plan
from intentions.precedence import by_precedence, decide, precedence
from intentions.render import Foreign, enforceable
from mesh.consul.client import Consul
from mesh.consul.doors import Contents, IntentionsDoor, open_intentions, refuse_foreign
from regions.cli.errors import Exit, Refused, UsageError
from regions.cli.output import emit_json, table, talk

T = TypeVar("T")
WORLD = Path(os.environ.get("WEIR_DIR") or ".weir")

CATALOG = "catalog.yaml"

ConsulOption = Annotated[
    str,
    typer.Option(
        "--consul",
        envvar="CONSUL_HTTP_ADDR",
        help="Agent to talk to, http://host:port. Default: the primary of the world in .weir/ (WEIR_DIR).",
        show_default=False,
    ),
]
DirOption = Annotated[
    Path | None,
    typer.Option("--dir", help="Folder with catalog.yaml. Default: ./intentions, else the one of weir."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
FromCatalog = Annotated[bool, typer.Option("--catalog", help="Ask the data file; Consul isn't needed.")]

app = typer.Typer(no_args_is_help=True, help="Who may call whom: data in intentions/, enforced by Envoy.")


def register(root: typer.Typer) -> None:
    """Entry point `20_intentions` of the group weir.commands."""
    root.add_typer(app, name="intentions")


@app.command("list")
def list_(
    consul: ConsulOption = "",
    folder: DirOption = None,
    catalog: FromCatalog = False,
    as_json: JsonOption = False,
) -> None:
    """The intentions in Consul (or in the data file), the deciding ones first."""
    now = _contents(consul, folder, catalog)
    if as_json:
        emit_json(
            {
                "source": "catalog" if catalog else "consul",
                "intentions": [_row(i) for i in by_precedence(now.ours)],
                "foreign": [_foreign_row(f) for f in now.foreign],
            }
        )
        return
    shown = Table("source", "destination", "action", "precedence", "description", box=None)
    for item in by_precedence(now.ours):
        cells = (item.source, item.destination, item.action.value, str(precedence(item)), item.description)
        shown.add_row(*cells)
    table().print(shown, markup=False)
    _tell_foreign(now.foreign)


@app.command("plan")
def plan_(
    consul: ConsulOption = "",
    folder: DirOption = None,
    as_json: JsonOption = False,
    detailed: Annotated[
        bool, typer.Option("--detailed-exitcode", help="Exit 2 when there are changes.")
    ] = False,
) -> None:
    """What `apply` would change in Consul. Exit 0, also with changes (unless --detailed-exitcode)."""
    want = load_intentions(_file(folder))
    now = _through_door(consul, lambda door: door.read())
    todo = plan(now.ours, want)
    _show(todo, now.foreign, as_json, {})
    refuse_foreign(todo, now.foreign)
    if detailed and todo.changes:
        raise typer.Exit(2)


@app.command("apply")
def apply_(
    consul: ConsulOption = "",
    folder: DirOption = None,
    as_json: JsonOption = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")] = False,
) -> None:
    """Make Consul hold exactly what the data file says. Shows the plan and asks before it writes."""
    want = load_intentions(_file(folder))

    async def run(door: IntentionsDoor) -> None:
        now = await door.read()
        todo = plan(now.ours, want)
        refuse_foreign(todo, now.foreign)
        if todo.changes and not yes:
            _tell(todo, now.foreign)
            _confirm(todo)
        await door.carry_out(todo)
        _show(todo, now.foreign, as_json, {"applied": True})

    _through_door(consul, run)


@app.command("check")
def check(
    source: Annotated[str, typer.Argument(metavar="SRC")],
    destination: Annotated[str, typer.Argument(metavar="DST")],
    consul: ConsulOption = "",
    folder: DirOption = None,
    catalog: FromCatalog = False,
    as_json: JsonOption = False,
) -> None:
    """Whether SRC may call DST, and which intention says so. Exit 0: allowed, 1: denied."""
    for name in (source, destination):
        if not is_service_name(name):
            raise UsageError(
                f"service {name!r}", "not a service name", "name two services, such as: web chat"
            )
    now = _contents(consul, folder, catalog)
    decision = decide(enforceable(now.ours, now.foreign), source, destination)
    if as_json:
        rule = _row(decision.rule) if decision.rule else None
        body = {"source": source, "destination": destination, "allowed": decision.allowed}
        emit_json({**body, "action": decision.action.value, "rule": rule, "reason": decision.reason})
    else:
        table().print(f"{source} -> {destination}: {decision.reason}", markup=False)
    if not decision.allowed:
        raise typer.Exit(int(Exit.FAILED))


def _contents(consul: str, folder: Path | None, catalog: bool) -> Contents:
    if catalog:
        return Contents(load_intentions(_file(folder)))
    return _through_door(consul, lambda door: door.read())


def _through_door(consul: str, use: Callable[[IntentionsDoor], Awaitable[T]]) -> T:
    """Run one use of the door of this agent (and of nothing else) to its end."""

    async def run() -> T:
        async with _agent(consul) as client:
            return await use(await open_intentions(client))

    return asyncio.run(run())


def _agent(consul: str) -> Consul:
    """The agent named, else the primary's in the world of this folder. Raises UsageError without either.

    Tokens as for the consul CLI (CONSUL_HTTP_TOKEN, CONSUL_HTTP_TOKEN_FILE); a world brings its own.
    """
    if consul:
        return Consul.from_env(address=consul)
    way_out = (
        "give --consul http://host:port, set CONSUL_HTTP_ADDR, start a world (weir up), or use --catalog"
    )
    if not (WORLD / "world.json").is_file():
        raise UsageError("consul", f"no agent named, and no world in {WORLD}", way_out)
    # By name: the world's room stands above this one and must not be imported from here (import-linter).
    world = importlib.import_module("mesh.world.world").World.load(WORLD)
    env = dict(os.environ)
    if not env.get("CONSUL_HTTP_TOKEN_FILE"):
        env.setdefault("CONSUL_HTTP_TOKEN", world.token)
    return Consul.from_env(env, address=world.address(world.regions.primary.name).consul_http)


def _file(folder: Path | None) -> Path:
    return folder / CATALOG if folder else default_file()


def _confirm(todo: IntentionPlan) -> None:
    """Raise Refused unless a person says yes."""
    if not sys.stdin.isatty():
        raise Refused(
            "intentions apply", f"not confirmed: {todo.summary()}", "look at the plan, then give --yes"
        )
    if not typer.confirm(f"Write this to Consul ({todo.summary()})?", err=True):
        raise Refused("intentions apply", "not confirmed; nothing was written")


def _show(todo: IntentionPlan, foreign: tuple[Foreign, ...], as_json: bool, more: dict[str, Any]) -> None:
    if as_json:
        body = {
            "changes": todo.changes,
            "puts": [{**_row(p.new), "old": _row(p.old) if p.old else None} for p in todo.puts],
            "deletes": [_row(i) for i in todo.deletes],
            "unchanged": [_row(i) for i in todo.unchanged],
            "foreign": [_foreign_row(f) for f in foreign],
        }
        emit_json({**body, **more})
        return
    for line in todo.lines():
        table().print(line, markup=False, soft_wrap=True)
    done = "done: " if more.get("applied") else ""
    talk().print(f"{done}{todo.summary()}", markup=False)
    _tell_foreign(foreign)


def _tell(todo: IntentionPlan, foreign: tuple[Foreign, ...]) -> None:
    for line in todo.lines():
        talk().print(line, markup=False, soft_wrap=True)
    _tell_foreign(foreign)


def _tell_foreign(foreign: tuple[Foreign, ...]) -> None:
    for item in foreign:
        talk().print(f"left alone: {item.source} -> {item.destination}: {item.why}", markup=False)


def _row(item: Intention) -> dict[str, Any]:
    body = {"source": item.source, "destination": item.destination, "action": item.action.value}
    return {**body, "description": item.description, "precedence": precedence(item)}


def _foreign_row(item: Foreign) -> dict[str, str]:
    return {"source": item.source, "destination": item.destination, "why": item.why}
