"""One drill from beginning to end: lock, leftovers, run, judge, report, history in Consul.

Law: the composition root of `weir drill run`; the only place that makes real doors, clock and chance.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import signal
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from random import Random, SystemRandom
from typing import Any

from drills import healing, page, report, scenario_file
from drills.active import Active, ActiveFile
from drills.bearing import Bearing
from drills.doors import Doors
from drills.faults.table import build
from drills.live import open_doors
from drills.live_load import LiveGenerator
from drills.live_mesh import ROLE
from drills.locking import one_drill, who
from drills.model import Ingresses, Scenario
from drills.pace import Progress, Stop
from drills.runner import Drill, Plan
from drills.store import Store
from drills.versions import versions
from mesh.catalog import load_services
from mesh.clock import Clock, SystemClock
from mesh.consul import keys
from mesh.consul.client import Consul
from mesh.consul.errors import ConsulError
from mesh.traffic.manager import whoami
from mesh.world.engines import slower_s
from mesh.world.world import World
from regions.cli.errors import Exit, Refused, UsageError, WeirError

HEAL_S = 120.0
SHORT = ("scenario", "events", "failed_requests", "command")
"""Report keys that are left out of the history in Consul; the files have them."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What the caller wants. region: "" = as the scenario says. settings: of `--set`, not yet checked."""

    name: str
    settings: Mapping[str, str]
    region: str = ""
    command: str = ""


def scenario_of(world: World, ask: Ask) -> Scenario:
    """The scenario with everything decided, fitted to the world's rows. Raises UsageError, Refused."""
    draft = scenario_file.read(ask.name)
    settings = dict(ask.settings)
    wanted = ask.region or settings.pop("region", "") or draft.file.target
    region = world.spec.primary if wanted == "primary" else wanted
    if region not in world.regions.names:
        raise UsageError(
            f"region {region!r}", "not in this world", f"it has {', '.join(world.regions.names)}"
        )
    bearing = _bearing(world, settings.get("service", draft.file.service))
    scenario = scenario_file.decide(draft, settings, region=region, bearing=bearing)
    if scenario.load.ingresses is Ingresses.SURVIVING and world.regions.names == (region,):
        why = "its load goes to the regions that live on, and this world has no other"
        raise Refused(f"drill {draft.name}", why, "a world of two regions or more")
    return scenario


def _bearing(world: World, service: str) -> Bearing | None:
    """By the service rows that the world's control planes read; None for a service that has none."""
    folder, spec = Path(world.spec.services_dir), world.spec
    for row in load_services(folder):
        if row.name == service:
            told = f"{spec.instances} × capacity_rps {row.capacity_rps:g} of {folder / service}.yaml"
            return Bearing(spec.instances * row.capacity_rps, told, slower_s(spec.engine))
    return None


async def run(world: World, ask: Ask, say: Progress) -> tuple[report.Report, dict[str, Any]]:
    """Run one drill; its report and the report's JSON. Raises UsageError, Refused (lock, rights, load)."""
    scenario, clock, store = scenario_of(world, ask), SystemClock(), Store(world.folder)
    if not world.running:
        raise WeirError(f"world {world.folder}", "no region runs", f"weir up --dir {world.folder}")
    by, started, id_ = whoami(), report.iso(clock.time()), _new_id(scenario.name, clock)
    holder = {"drill": scenario.name, "id": id_, "by": by, "since": started}
    async with _agents(world, clock) as agents, one_drill(agents, holder):
        async with open_doors(world, scenario.service, clock, SystemRandom()) as doors:
            active = ActiveFile(store.folder)
            await heal_leftovers(active, doors, say, _heal_s(world))
            generator = LiveGenerator(world, store.place(id_), clock, secrets.randbits(32))
            with _stopping(say) as stop:
                plan = Plan(id_, by, started, scenario, doors, generator, build, active, say, stop)
                with store.unless_refused(id_):
                    outcome = await Drill(plan).run()
            facts = report.Facts(id_, by, started, await versions(), ask.command)
            made = report.build(facts, scenario, outcome)
            body = report.to_json(made, str(store.page(id_)))
            store.save(id_, body, page.render(made))
        await _remember(agents, id_, body, say)
    return made, body


def exit_code(body: Mapping[str, Any]) -> Exit:
    """What a command ends with after a drill with this report."""
    if body["interrupted"]:
        return Exit.INTERRUPTED
    return {"pass": Exit.DONE, "fail": Exit.FAILED, "unknown": Exit.UNKNOWN}[body["verdict"]]


async def heal(world: World, say: Progress) -> bool:
    """Heal what an earlier drill left; False when there is nothing. Works while Consuls are down."""
    active, clock = ActiveFile(Store(world.folder).folder), SystemClock()
    left = active.read()
    if left is None:
        return False
    service = left.faults[0].service if left.faults else "chat"
    holder = {"drill": "heal", "id": left.drill, "by": whoami(), "since": report.iso(clock.time())}
    async with (
        _agents(world, clock) as agents,
        one_drill(agents, holder, need_one=False),
        open_doors(world, service, clock, SystemRandom()) as doors,
    ):
        await heal_leftovers(active, doors, say, _heal_s(world))
    return True


def _heal_s(world: World) -> float:
    return HEAL_S + slower_s(world.spec.engine)


async def heal_leftovers(active: ActiveFile, doors: Doors, say: Progress, limit_s: float = HEAL_S) -> None:
    """Undo what a drill that died has left. The caller holds the lock, so that drill is really over.

    Raises WeirError with the commands for a person when it can't be proven healed.
    """
    left: Active | None = active.read()
    if left is None:
        return
    say.phase("heal", f"drill {left.drill} by {left.by} ended without healing")
    faults = [build(spec, doors) for spec in left.faults]
    done = await healing.heal(faults, doors.clock, limit_s, say.say)
    if not done.healed:
        raise WeirError(f"drill {left.drill}", "its faults could not be healed", "; ".join(done.by_hand))
    active.clear()


async def running(world: World) -> Mapping[str, str] | None:
    """Who runs a drill now."""
    async with _agents(world, SystemClock()) as agents:
        return await who(agents)


@asynccontextmanager
async def _agents(world: World, clock: Clock) -> AsyncIterator[dict[str, Consul]]:
    async with AsyncExitStack() as stack:
        agents: dict[str, Consul] = {}
        for region in world.running:
            address, token = world.address(region).consul_http, world.token_of(ROLE)
            client = Consul(address, token, clock=clock, rng=Random())  # noqa: S311
            agents[region] = await stack.enter_async_context(client)
        yield agents


@contextlib.contextmanager
def _stopping(say: Progress) -> Iterator[Stop]:
    """Ctrl-C (and SIGTERM, SIGHUP) as orders to the drill instead of exceptions in its middle."""
    stop, loop = Stop(), asyncio.get_running_loop()

    def order() -> None:
        if stop.asked.is_set():
            stop.abandoned.set()
            say.say("stopping at once; what is left is told below")
        else:
            stop.asked.set()
            say.say("interrupted: healing first (once more: stop at once)")

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for sign in signals:
        loop.add_signal_handler(sign, order)
    try:
        yield stop
    finally:
        for sign in signals:
            loop.remove_signal_handler(sign)


def _new_id(name: str, clock: Clock) -> str:
    stamp = datetime.fromtimestamp(clock.time(), UTC).strftime("%Y%m%dT%H%M%SZ")
    return f"{stamp}-{name}-{secrets.token_hex(3)}"


async def _remember(agents: Mapping[str, Consul], id_: str, body: Mapping[str, Any], say: Progress) -> None:
    """The verdict and its figures under drills/history/ in every region that answers."""
    short = json.dumps({k: v for k, v in body.items() if k not in SHORT}).encode()
    for region, agent in agents.items():
        try:
            async with asyncio.timeout(5.0):
                await agent.kv_put(f"{keys.DRILLS}history/{id_}", short)
        except (ConsulError, TimeoutError) as error:
            say.say(f"history in {region} was not written: {error or type(error).__name__}")
