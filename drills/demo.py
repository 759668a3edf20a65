"""`weir demo`, the story in three minutes: regions come up, a canary grows by one key, a region dies.

Law: uses what a user would use (weir up, a plain KV write, a drill, weir down). Its world lives in a
folder of its own; everything is stopped and removed in the end, whatever happens, and that is proven.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import SystemRandom
from typing import Any

from rich.console import Console

from drills import session, show
from drills.doors import Doors
from drills.history import Request, StatusSeen
from drills.live import open_doors
from drills.live_load import LiveGenerator
from drills.model import Load
from drills.talk import Talk
from mesh.clock import SystemClock
from mesh.consul import keys
from mesh.model import CANARY
from mesh.world import strays
from mesh.world.down import take_down
from mesh.world.up import bring_up
from mesh.world.wish import Wish
from mesh.world.world import World
from regions.cli.errors import Exit, WeirError
from regions.cli.output import emit_json, table, talk

WEIGHT = 0.15
SERVICE = "chat"
RATE = 200.0
BEFORE_S, AFTER_S, APPLY_S = 3.0, 8.0, 10.0
DRILL = {"load": "6", "duration": "12", "settle": "4"}
REPORTS = Path("report")
"""Where the demo's report is kept: its world is removed."""


@dataclass(frozen=True, slots=True)
class Canary:
    """What one key did. Seconds from the write: until the first request went to the canary, until the last
    ACK of all regions. share: observed over `requests` sent after that.
    """

    first_s: float | None
    applied_s: float
    before: float | None
    share: float | None
    requests: int


def demo(instances: int | None, *, as_json: bool) -> Exit:
    """Tell the story; the exit code is the drill's. instances: stable ones per region, None = default."""
    console, clock = talk(), SystemClock()
    began = clock.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="weir-demo-"))
    body: dict[str, Any] = {"interrupted": True}
    try:
        body = _story(folder, instances, console)
        _ending(body, as_json)
    except KeyboardInterrupt:
        console.print("interrupted")
    finally:
        _clean(folder, console)
    console.print(f"the whole story took {clock.monotonic() - began:.0f} s")
    return session.exit_code(body)


def _story(folder: Path, instances: int | None, console: Console) -> dict[str, Any]:
    console.rule("1 · three regions come up")
    world = bring_up(folder, Wish(instances=instances), None, console)
    console.rule(f"2 · one key: {keys.DEFAULT_CANARY} = {WEIGHT}")
    _tell_canary(asyncio.run(_canary(world)), console)
    console.rule("3 · the primary datacenter is killed under load")
    with Talk(console, SystemClock()) as progress:
        made, body = asyncio.run(
            session.run(world, session.Ask("region-loss", DRILL, command="weir demo"), progress)
        )
    return _keep(body, made.facts.id)


async def _canary(world: World) -> Canary:
    """Write the key as `consul kv put` would, and watch the traffic follow."""
    clock = SystemClock()
    work = Path(tempfile.mkdtemp(prefix="load-", dir=world.folder))
    generator = LiveGenerator(world, work, clock, seed=1)
    region = next(n for n in world.regions.names if n != world.spec.primary)
    async with open_doors(world, SERVICE, clock, SystemRandom()) as doors:
        try:
            await generator.start(Load(rate=RATE), SERVICE, world.regions.names)
            await clock.sleep(BEFORE_S)
            put_at = clock.time()
            await doors.orders.write_key(region, keys.DEFAULT_CANARY, str(WEIGHT).encode())
            applied_at = await _applied(doors)
            await clock.sleep(AFTER_S)
        finally:
            requests = await generator.stop()
    return _measured(requests, put_at, applied_at)


async def _applied(doors: Doors) -> float:
    """Unix time of the last ACK of the last region. Raises WeirError when that doesn't come."""
    deadline = doors.clock.monotonic() + APPLY_S
    while True:
        found = [StatusSeen.from_document(d, 0.0) for d in (await doors.statuses.documents(SERVICE)).values()]
        if len(found) == len(doors.names) and all(s.applied and s.canary == WEIGHT for s in found):
            return max(s.times.applied for s in found)
        if doors.clock.monotonic() > deadline:
            late = sorted(set(doors.names) - {s.region for s in found if s.applied and s.canary == WEIGHT})
            raise WeirError("canary weight", f"not applied in {', '.join(late)}", "see `weir status`")
        await doors.clock.sleep(0.02)


def _measured(requests: Sequence[Request], put_at: float, applied_at: float) -> Canary:
    first = min((r.sent_s for r in requests if r.stage == CANARY and r.sent_s >= put_at), default=None)
    return Canary(
        None if first is None else first - put_at,
        applied_at - put_at,
        _share([r for r in requests if r.ok and r.sent_s < put_at]),
        _share(after := [r for r in requests if r.ok and r.sent_s > applied_at]),
        len(after),
    )


def _share(requests: Sequence[Request]) -> float | None:
    return sum(r.stage == CANARY for r in requests) / len(requests) if requests else None


def _tell_canary(seen: Canary, console: Console) -> None:
    before = "nothing" if not seen.before else f"{seen.before:.1%}"
    console.print(f"before: {before} went to the canary")
    first = (
        "no request"
        if seen.first_s is None
        else f"the first request {seen.first_s * 1000:.0f} ms after the write"
    )
    applied = f"every region's proxies acknowledged it after {seen.applied_s * 1000:.0f} ms"
    console.print(f"after:  {first}; {applied}", soft_wrap=True)
    share = "nothing" if seen.share is None else f"{seen.share:.1%}"
    console.print(f"        {share} of {seen.requests} requests went to the canary ({WEIGHT:.0%} wanted)")


def _keep(body: dict[str, Any], drill: str) -> dict[str, Any]:
    """Copy page and JSON out of the demo's world; returns the JSON with the page's new path."""
    REPORTS.mkdir(exist_ok=True)
    page = (REPORTS / f"{drill}.html").absolute()
    shutil.copyfile(body["report"], page)
    kept = body | {"report": str(page)}
    page.with_suffix(".json").write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
    return kept


def _ending(body: dict[str, Any], as_json: bool) -> None:
    if as_json:
        emit_json({k: v for k, v in body.items() if k != "schema_version"})
    else:
        table().print(show.summary(body))


def _clean(folder: Path, console: Console) -> None:
    """Stop and remove all of it, and prove it. Ctrl-C waits so long (bounded): it would leave processes."""
    console.rule("4 · everything is stopped")
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        take_down(folder, purge=True)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        signal.signal(signal.SIGINT, before)
    left = strays.find(folder)
    if left or folder.exists():
        told = ", ".join(f"{s.process} (process {s.pid})" for s in left) or str(folder)
        raise WeirError(
            "weir demo", f"left behind: {told}", f"kill them, rm -r {folder}", exit_code=Exit.FAILED
        )
    console.print("no process and no file of it is left")
