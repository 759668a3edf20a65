"""`weir up | status | down | region up | down | run | list`.

Law: parses, hands over, prints. The room's own parts are imported inside, so that `weir --help` stays fast.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from regions.cli.errors import Exit, UsageError
from regions.cli.output import emit_json, table, talk

Folder = Annotated[
    Path, typer.Option("--dir", "--world", envvar="WEIR_DIR", help="Folder of the world's state.")
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]

region_app = typer.Typer(help="One region of the local world.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Entry point of the group `weir.commands`."""
    app.command("up", help="Bring the local world up; what runs already stays as it is.")(up)
    app.command("down", help="Stop everything of the local world.")(down)
    app.command("status", help="What runs, what is applied, what is observed.")(status)
    app.add_typer(region_app, name="region")


def up(
    folder: Folder = Path(".weir"),
    regions: Annotated[str, typer.Option(help="Regions, comma-separated (default: all).")] = "",
    instances: Annotated[
        int | None, typer.Option(help="Stable instances per region (2; torch, vllm: 1).")
    ] = None,
    canaries: Annotated[int | None, typer.Option(help="Canary instances per region (1; vllm: 0).")] = None,
    http: Annotated[bool | None, typer.Option("--http/--no-http", help="Also plain HTTP in.")] = None,
    acl: Annotated[bool | None, typer.Option("--acl/--no-acl", help="Consul ACLs, default deny.")] = None,
    engine: Annotated[str | None, typer.Option(help="echo, sim, torch or vllm (echo).")] = None,
    model: Annotated[str | None, typer.Option(help="Model name or folder (the engine's own).")] = None,
    option: Annotated[
        list[str] | None, typer.Option("--option", help="Engine option NAME=VALUE; may be repeated.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Number of the executors NAME=VALUE (weir executor --settings)."),
    ] = None,
    token_cost_ms: Annotated[float | None, typer.Option(help="Cost of a token, echo engine (2).")] = None,
    subnet: Annotated[int | None, typer.Option(help="World number: addresses 127.N.r.x.")] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Ingress certificate chain (PEM).")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its key (PEM).")] = None,
    regions_dir: Annotated[Path | None, typer.Option(help="Folder of region files.")] = None,
    timeout: Annotated[
        float | None, typer.Option(help="Seconds to wait for readiness (120; torch 300, vllm 900).")
    ] = None,
) -> None:
    """Bring up what is missing, wait until it is ready, say where everything is."""
    from mesh.world.show import where
    from mesh.world.up import bring_up
    from mesh.world.wish import Wish

    want = Wish(
        regions=_names(regions),
        instances=instances,
        canaries=canaries,
        http=http,
        acl=acl,
        engine=engine,
        model=model,
        options=tuple(option) if option else None,
        settings=tuple(settings) if settings else None,
        token_cost_ms=token_cost_ms,
        subnet=subnet,
        tls_cert=str(tls_cert.absolute()) if tls_cert else None,
        tls_key=str(tls_key.absolute()) if tls_key else None,
    )
    console = talk()
    try:
        world = bring_up(folder.absolute(), want, None, console, regions_dir=regions_dir, timeout_s=timeout)
    except KeyboardInterrupt:
        raise typer.Exit(int(Exit.INTERRUPTED)) from None
    table().print(where(world))
    console.print(f"ready. Try: weir status; CA for clients: {world.ca_file}", soft_wrap=True)


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM is taken like Ctrl-C (what was started is stopped again); both end with exit code 130."""
    old = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(int(Exit.INTERRUPTED)) from None
    finally:
        signal.signal(signal.SIGTERM, old)


def _names(text: str) -> tuple[str, ...] | None:
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    if text and not names:
        raise UsageError(
            "--regions", f"{text!r} names no region", "for instance --regions cn-north-1,us-east-1"
        )
    return names or None


def down(
    folder: Folder = Path(".weir"),
    purge: Annotated[bool, typer.Option("--purge", help="Also forget all state (KV, CA).")] = False,
) -> None:
    """Stop everything of this world, prove that nothing is left."""
    from mesh.world.down import take_down

    ended = take_down(folder.absolute(), purge=purge)
    said = f"stopped {', '.join(ended.regions)}" if ended.regions else "no region was running"
    strays = f"; ended {len(ended.strays)} stray processes" if ended.strays else ""
    talk().print(f"{said}{strays}; nothing is left running", soft_wrap=True)


def status(
    folder: Folder = Path(".weir"),
    watch: Annotated[bool, typer.Option("--watch", help="Refresh every second until Ctrl-C.")] = False,
    as_json: AsJson = False,
) -> None:
    """State of regions and traffic."""
    import asyncio

    from mesh.world.show import view
    from mesh.world.status import gather
    from mesh.world.world import World

    if watch and as_json:
        raise UsageError("weir status", "--watch and --json don't go together", "run --json again and again")
    world = World.load(folder)
    if watch:
        asyncio.run(_watch(world))
        return
    body = asyncio.run(gather(world))
    if as_json:
        emit_json(body)
    else:
        table().print(view(body))


async def _watch(world: object) -> None:
    import asyncio
    import contextlib

    from rich.live import Live

    from mesh.world.show import view
    from mesh.world.status import gather
    from mesh.world.world import World

    assert isinstance(world, World)
    with contextlib.suppress(asyncio.CancelledError), Live(console=table(), auto_refresh=False) as live:
        while True:
            live.update(view(await gather(world)), refresh=True)
            await asyncio.sleep(1.0)


@region_app.command("up")
def region_up(
    name: Annotated[str, typer.Argument(help="Region name.")],
    folder: Folder = Path(".weir"),
    as_json: AsJson = False,
    regions_dir: Annotated[Path | None, typer.Option(help="Folder of region files.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for readiness.")] = 120.0,
) -> None:
    """Bring one region up; fine when it is up already. Its facts stand in regions/NAME/region.json."""
    from mesh.world.facts import facts
    from mesh.world.up import bring_up
    from mesh.world.wish import Wish

    try:
        world = bring_up(folder.absolute(), Wish(), name, talk(), regions_dir=regions_dir, timeout_s=timeout)
    except KeyboardInterrupt:
        raise typer.Exit(int(Exit.INTERRUPTED)) from None
    body = facts(world.spec, world.layout.region(name), ready=True)
    if as_json:
        emit_json(body)
    else:
        table().print(f"{name}: Consul {body['consul']}, ingress {body['ingress']}")


@region_app.command("down")
def region_down(
    name: Annotated[str, typer.Argument(help="Region name.")], folder: Folder = Path(".weir")
) -> None:
    """Stop one region; fine when it is down already. Its Consul data stays."""
    from mesh.world.down import region_down as take_region_down

    ended = take_region_down(folder.absolute(), name)
    talk().print(f"{name}: {'stopped' if ended.regions else 'was not running'}")


@region_app.command("run", hidden=True)
def region_run(
    name: Annotated[str, typer.Argument(help="Region name.")], folder: Folder = Path(".weir")
) -> None:
    """Run one region in the foreground until SIGTERM (what `weir up` starts in the background)."""
    from mesh.world.runner import run_region

    run_region(folder.absolute(), name)


@region_app.command("list")
def region_list(folder: Folder = Path(".weir"), as_json: AsJson = False) -> None:
    """Regions of the world and whether they run."""
    from rich.table import Table

    from mesh.world.world import World

    world = World.load(folder)
    pids = {name: world.supervisor(name) for name in world.spec.names}
    if as_json:
        emit_json({"regions": {n: {"running": p is not None, "supervisor": p} for n, p in pids.items()}})
        return
    shown = Table("region", "running", "Consul", box=None)
    for name, pid in pids.items():
        shown.add_row(name, f"yes (process {pid})" if pid else "no", world.address(name).consul_http)
    table().print(shown)
