"""`weir pool status | sleep | wake`: shows and drives the hot pool of a world, or of one Consul.

Law: finds instances in Consul, asks plan.py whether they may, drives their doors, tells. Exit 4: refused, 5:
some of it was done, or some regions are silent.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regions.cli.errors import Exit, Refused, UsageError, WeirError

if TYPE_CHECKING:
    from mesh.consul.client import Consul
    from services.pool.hand import Doors, Pool, Said
    from services.pool.plan import Member

Dir = Annotated[Path, typer.Option("--dir", "--world", envvar="WEIR_DIR", help="Folder of the world.")]
Agent = Annotated[
    str, typer.Option("--consul", help="One Consul agent instead of a world; token as its CLI.")
]
Service = Annotated[str, typer.Option("--service", "-s", help="Service.")]
Region = Annotated[str, typer.Option("--region", help="Region; needed where an id stands in several.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
Timeout = Annotated[float, typer.Option(help="Longest wait for one instance, in seconds.")]
Names = Annotated[list[str], typer.Argument(metavar="INSTANCE...", help="Instance id, or REGION/ID.")]

WORLD, CHAT = Path(".weir"), "chat"
app = typer.Typer(no_args_is_help=True, help="The hot pool: which instances sleep, and on which device.")


def register(root: typer.Typer) -> None:
    """Entry point `54_pool` of the group weir.commands."""
    root.add_typer(app, name="pool")


@app.command("status")
def status(
    dir: Dir = WORLD, consul: Agent = "", region: Region = "", service: Service = CHAT, json: Json = False
) -> None:
    """Every instance: state, device, its load and memory, how long it has slept."""

    async def look(agents: dict[str, Consul], doors: Doors) -> int:
        from mesh.clock import SystemClock
        from services.pool import hand, show

        pool = await hand.read(agents, service)
        show.status(pool, await doors.states(pool), SystemClock().time(), json=json)
        if len(pool.silent) == len(agents):
            return int(Exit.FAILED)
        return int(Exit.PARTIAL if pool.silent else Exit.DONE)

    _run(dir, consul, region, 10.0, look)


@app.command("sleep")
def sleep(
    names: Names,
    level: Annotated[
        int, typer.Option(help="1: weights parked, 2: dropped, 0: engine closed.", min=0, max=2)
    ] = 1,
    force: Annotated[bool, typer.Option("--force", help="Also the last ready one that has traffic.")] = False,
    dir: Dir = WORLD,
    consul: Agent = "",
    region: Region = "",
    service: Service = CHAT,
    timeout: Timeout = 120.0,
    json: Json = False,
) -> None:
    """Drain, then sleep, one after the other. The last ready instance of a stage with traffic is refused."""

    async def each(who: Member, pool: Pool, doors: Doors) -> Said:
        from services.pool.hand import settled
        from services.pool.plan import why_keep

        if not force and (why := why_keep(who, pool.members, pool.traffic(who))):
            raise Refused(f"{who.region}/{who.instance}", why, "wake another one first, or use --force")
        return settled(await doors.sleep(who, level), "asleep" if level else "cold")

    _verb("sleep", names, each, (dir, consul, region, service), timeout, json=json)


@app.command("wake")
def wake(
    names: Names,
    device: Annotated[str, typer.Option(help="Rebuild on this device (weir device list).")] = "",
    dir: Dir = WORLD,
    consul: Agent = "",
    region: Region = "",
    service: Service = CHAT,
    timeout: Timeout = 600.0,
    json: Json = False,
) -> None:
    """Wake, verify, take traffic. If its device is over 85 % busy: rebuilt on the least loaded one."""

    async def each(who: Member, _: Pool, doors: Doors) -> Said:
        from services.pool.hand import settled

        said = await doors.wake(who, device)
        # One that runs stays where it is: another device was asked for and not given.
        return said if device else settled(said, "running")

    _verb("wake", names, each, (dir, consul, region, service), timeout, json=json)


Each = Callable[["Member", "Pool", "Doors"], Awaitable["Said"]]
Where = tuple[Path, str, str, str]


def _verb(verb: str, names: list[str], each: Each, where: Where, limit_s: float, *, json: bool) -> None:
    dir, consul, region, service = where

    async def drive(agents: dict[str, Consul], doors: Doors) -> int:
        from regions.cli.output import talk
        from services.pool import hand, show

        pool = await hand.read(agents, service)
        chosen = [_one(pool, name, region) for name in dict.fromkeys(names)]
        rows: list[tuple[Member, Said]] = []
        refused: list[Refused] = []
        for who in chosen:
            # Read anew each time: what was put to sleep just now counts for the next.
            pool = await hand.read(agents, service) if rows else pool
            try:
                with talk().status(f"{verb} {who.region}/{who.instance} …"):
                    said = await each(who, pool, doors)
            except Refused as error:
                refused.append(error)
                said = hand.Said(show.REFUSED, {"error": error.why})
            show.done(verb, who, said)
            rows.append((who, said))
        show.results(verb, rows, json=json)
        good = sum(said.ok for _, said in rows)
        if good == len(rows):
            return int(Exit.DONE)
        if good:
            return int(Exit.PARTIAL)
        if len(refused) == len(rows):
            raise refused[0]
        return int(Exit.FAILED)

    _run(dir, consul, region, limit_s, drive)


def _one(pool: Pool, name: str, region: str) -> Member:
    """Raises UsageError when no instance, or one in several regions, has this name; WeirError when that
    can't be known."""
    from services.pool.plan import find

    place, slash, id_ = name.rpartition("/")
    found = find(pool.members, id_ if slash else name, place or region)
    if not found:
        if pool.silent:
            why = "; ".join(f"{region}: {text}" for region, text in pool.silent.items())
            raise WeirError(f"instance {name!r}", f"not found, and a Consul is silent: {why}", "weir status")
        raise UsageError(f"instance {name!r}", "Consul knows none", "weir pool status lists all")
    if len(found) > 1:
        places = ", ".join(f"{m.region}/{m.instance}" for m in found)
        raise UsageError(f"instance {name!r}", f"there are {len(found)}", f"say which one: {places}")
    return found[0]


@asynccontextmanager
async def _agents(dir: Path, consul: str, region: str) -> AsyncIterator[dict[str, Consul]]:
    from contextlib import AsyncExitStack

    from mesh.clock import SystemClock
    from mesh.consul.client import Consul
    from mesh.world.world import World

    clock = SystemClock()
    async with AsyncExitStack() as stack:
        if consul:
            client = await stack.enter_async_context(Consul.from_env(address=consul, clock=clock))
            yield {region or (await client.self_info()).datacenter: client}
            return
        world = World.load(dir)
        names = (region,) if region else world.regions.names
        yield {
            name: await stack.enter_async_context(
                Consul(world.address(name).consul_http, world.token, clock=clock)
            )
            for name in names
        }


def _run(
    dir: Path,
    consul: str,
    region: str,
    limit_s: float,
    act: Callable[[dict[str, Consul], Doors], Awaitable[int]],
) -> None:
    import asyncio

    from services.pool.hand import Doors

    async def main() -> int:
        async with _agents(dir, consul, region) as agents, Doors(limit_s) as doors:
            return await act(agents, doors)

    try:
        code = asyncio.run(main())
    except KeyboardInterrupt:
        raise typer.Exit(int(Exit.INTERRUPTED)) from None
    if code:
        raise typer.Exit(code)
