"""`weir traffic show | set | shift | evacuate | restore | history | undo`.

Law: asks, shows, confirms, waits, tells. What is allowed and what follows is decided by mesh.traffic.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regions.cli.errors import Exit, Refused, UsageError

if TYPE_CHECKING:
    from mesh.traffic.manager import Traffic
    from mesh.traffic.proposal import Proposal
    from mesh.world.traffic_hand import Hand

Dir = Annotated[Path, typer.Option("--dir", "--world", envvar="WEIR_DIR", help="Folder of the world.")]
Service = Annotated[str, typer.Option("--service", "-s", help="Service; needed only when there are several.")]
Here = Annotated[str, typer.Option("--region", help="Region in whose Consul to read and write.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")]
Force = Annotated[bool, typer.Option("--force", help="Overrule a safety rule; needs --reason.")]
Reason = Annotated[str, typer.Option("--reason", help="Why; kept in the audit entry.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
Timeout = Annotated[float, typer.Option(help="Seconds until a change that isn't applied is a failure.")]
Tolerance = Annotated[float, typer.Option(help="How far an observed share may be off (0.02 = 2 points).")]
NoWait = Annotated[bool, typer.Option("--no-wait", help="Return as soon as it is written.")]

WORLD = Path(".weir")


def register(app: typer.Typer) -> None:
    """Entry point of the group `weir.commands`."""
    traffic = typer.Typer(help="Show and move traffic between stages and regions.", no_args_is_help=True)
    for name, command in _COMMANDS.items():
        traffic.command(name)(command)
    app.add_typer(traffic, name="traffic")


def show(dir: Dir = WORLD, service: Service = "", region: Here = "", json: Json = False) -> None:
    """What is in force, applied and observed in every region."""
    from mesh.world import traffic_view

    async def look(hand: Hand) -> int:
        name = _service(hand.traffic, service)
        documents = await hand.traffic.documents(name)
        traffic_view.show(name, documents, hand.silent, as_json=json)
        return int(Exit.PARTIAL if hand.silent else Exit.DONE)

    _run(dir, region, look)


def set_canary(
    words: Annotated[list[str], typer.Argument(metavar="[SERVICE] [canary-weight] WEIGHT", help="e.g. 0.15")],
    default: Annotated[bool, typer.Option(help="The default of all services, not of this one.")] = False,
    dir: Dir = WORLD,
    service: Service = "",
    region: Here = "",
    yes: Yes = False,
    force: Force = False,
    reason: Reason = "",
    timeout: Timeout = 10.0,
    tolerance: Tolerance = 0.02,
    no_wait: NoWait = False,
    json: Json = False,
) -> None:
    """Set the canary's share, a fraction in [0, 1]."""
    *names, text = [word for word in words if word != "canary-weight"] or [""]
    try:
        weight = float(text)
    except ValueError:
        raise UsageError("canary weight", f"{text!r} is not a number", "15 % is written 0.15") from None

    async def propose(traffic: Traffic) -> Proposal:
        return await traffic.set_canary(_service(traffic, service or "".join(names)), weight, default=default)

    _change(dir, region, propose, _Wishes(yes, force, reason, timeout, tolerance, no_wait, json))


def shift(
    shares: Annotated[
        list[str], typer.Argument(metavar="REGION=WEIGHT...", help="e.g. cn-north-1=70 us-east-1=30")
    ],
    dir: Dir = WORLD,
    service: Service = "",
    region: Here = "",
    yes: Yes = False,
    force: Force = False,
    reason: Reason = "",
    timeout: Timeout = 10.0,
    tolerance: Tolerance = 0.02,
    no_wait: NoWait = False,
    json: Json = False,
) -> None:
    """Set the shares of the regions; a region not named gets nothing."""
    wanted = {}
    for part in shares:
        name, _, weight = part.partition("=")
        try:
            wanted[name] = float(weight)
        except ValueError:
            raise UsageError(f"share {part!r}", "not REGION=WEIGHT", "for example us-east-1=30") from None

    async def propose(traffic: Traffic) -> Proposal:
        from mesh.traffic.values import ValueRefused

        try:
            return await traffic.shift(_service(traffic, service), wanted)
        except ValueRefused as refused:
            raise UsageError("shares", str(refused), "weir regions list") from None

    _change(dir, region, propose, _Wishes(yes, force, reason, timeout, tolerance, no_wait, json))


def _of_a_region(verb: str, told: str) -> Callable[..., None]:
    """The command `verb REGION`: evacuate and restore differ in nothing but what they propose."""

    def command(
        name: Annotated[str, typer.Argument(metavar="REGION")],
        dir: Dir = WORLD,
        service: Service = "",
        region: Here = "",
        yes: Yes = False,
        force: Force = False,
        reason: Reason = "",
        timeout: Timeout = 10.0,
        tolerance: Tolerance = 0.02,
        no_wait: NoWait = False,
        json: Json = False,
    ) -> None:
        async def propose(traffic: Traffic) -> Proposal:
            ask = traffic.evacuate if verb == "evacuate" else traffic.restore
            return await ask(_service(traffic, service), name)

        _change(dir, region, propose, _Wishes(yes, force, reason, timeout, tolerance, no_wait, json))

    command.__doc__ = told
    return command


def history(
    dir: Dir = WORLD,
    region: Here = "",
    limit: Annotated[int, typer.Option("--limit", "-n", min=1)] = 20,
    json: Json = False,
) -> None:
    """Who changed what, newest first, from the audit entries of all regions."""
    from mesh.world import traffic_view

    async def look(hand: Hand) -> int:
        traffic_view.history(await hand.traffic.history(limit), as_json=json)
        return int(Exit.DONE)

    _run(dir, region, look)


def undo(
    change: Annotated[str, typer.Argument(metavar="[CHANGE-ID]", help="Default: the latest change.")] = "",
    dir: Dir = WORLD,
    region: Here = "",
    yes: Yes = False,
    force: Force = False,
    reason: Reason = "",
    timeout: Timeout = 10.0,
    tolerance: Tolerance = 0.02,
    no_wait: NoWait = False,
    json: Json = False,
) -> None:
    """Put back what a change replaced, unless its key was changed since."""

    async def propose(traffic: Traffic) -> Proposal:
        return await traffic.undo(change)

    _change(dir, region, propose, _Wishes(yes, force, reason, timeout, tolerance, no_wait, json))


_COMMANDS: dict[str, Callable[..., None]] = {
    "show": show,
    "set": set_canary,
    "shift": shift,
    "evacuate": _of_a_region("evacuate", "Give a region no new requests; sessions come home on `restore`."),
    "restore": _of_a_region("restore", "Let an evacuated region take requests again."),
    "history": history,
    "undo": undo,
}


class _Wishes:
    """How a person wants a change to be carried out."""

    def __init__(
        self, yes: bool, force: bool, reason: str, timeout: float, tolerance: float, no_wait: bool, json: bool
    ) -> None:
        self.yes, self.force, self.reason, self.json = yes, force, reason, json
        self.timeout, self.tolerance, self.no_wait = timeout, tolerance, no_wait


def _change(
    dir: Path, region: str, propose: Callable[[Traffic], Awaitable[Proposal]], wishes: _Wishes
) -> None:
    from mesh.traffic.manager import whoami
    from mesh.traffic.proposal import Change
    from mesh.world import traffic_view

    async def work(hand: Hand) -> int:
        wanted = await propose(hand.traffic)
        traffic_view.proposal(wanted)
        if not wanted.changes:
            traffic_view.unchanged(wanted, as_json=wishes.json)
            return int(Exit.DONE)
        blocked = bool(wanted.refusals) and not wishes.force
        if not blocked and not wishes.yes and not _confirmed():
            raise Refused(
                f"change of {wanted.key}", "not confirmed; nothing was written", "--yes skips the question"
            )
        change = Change(whoami(), wishes.reason, wishes.force, "weir traffic")
        identity = await hand.traffic.commit(wanted, change)
        with traffic_view.written(identity):
            if wishes.no_wait:
                traffic_view.outcome(wanted, identity, None, hand.silent, as_json=wishes.json)
                return int(Exit.DONE)
            seen = await hand.traffic.wait(
                wanted.outlook, timeout_s=wishes.timeout, tolerance=wishes.tolerance
            )
        traffic_view.outcome(wanted, identity, seen, hand.silent, as_json=wishes.json)
        if not seen.applied or seen.observed is False:
            return int(Exit.FAILED)
        return int(Exit.PARTIAL if hand.silent else Exit.DONE)

    _run(dir, region, work)


def _confirmed() -> bool:
    import sys

    return sys.stdin.isatty() and typer.confirm("Apply this?", err=True)


def _service(traffic: Traffic, name: str) -> str:
    if name:
        return traffic.spec(name).name
    if len(traffic.services) != 1:
        known = ", ".join(s.name for s in traffic.services)
        raise UsageError("service", "there are several", f"--service one of {known}")
    return traffic.services[0].name


def _run(dir: Path, region: str, work: Callable[[Hand], Awaitable[int]]) -> None:
    import asyncio

    from mesh.world.traffic_hand import hand
    from mesh.world.world import World

    async def main() -> Any:
        async with hand(World.load(dir), region) as opened:
            return await work(opened)

    raise typer.Exit(asyncio.run(main()))
