"""A world for drills in virtual time: regions that die and come back, control planes that answer, load.

Law: the doors of drills.doors, with the contract asserted (heal must be possible without an inject, a
frozen process is not dead, nothing is read from a dead region). Time moves only when somebody sleeps.
"""

from __future__ import annotations

import asyncio
import math
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from drills.doors import Doors, ProcessSeen
from drills.history import Request
from drills.model import Load
from drills.recorder import Recorder
from regions.cli.errors import WeirError

NAMES = ("cn-north-1", "us-east-1", "westeurope")
SHARES = {"cn-north-1": 5_000, "us-east-1": 3_000, "westeurope": 2_000}
START = 1_800_000_000.0
SERVICE = "chat"


class FakeClock:
    """Virtual time. Two sleepers at once both move it: durations are then upper bounds."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return START + self.now

    async def sleep(self, s: float) -> None:
        self.now += max(0.0, s)
        await asyncio.sleep(0)


@dataclass
class FakeRegion:
    alive: bool = True
    frozen: bool = False
    held: set[str] = field(default_factory=set)
    broken_at: float | None = None
    ups: int = 0


class FakeWorld:
    """All doors in one. detect_s: from a region's loss to the survivors' new plan. lost_s: how long
    requests meant for a lost region fail. never_up: it can't be brought up again.
    """

    def __init__(self, *, detect_s: float = 0.8, lost_s: float = 0.0, never_up: bool = False) -> None:
        self.clock = FakeClock()
        self.regions = {name: FakeRegion() for name in NAMES}
        self.keys: dict[str, bytes] = {"config/traffic/canary-weight": b"0.1"}
        self.evacuated: set[str] = set()
        self.changed_at = 0.0
        self.detect_s, self.lost_s, self.never_up = detect_s, lost_s, never_up
        self.rules: list[str] = []
        self.may_set_rules = True
        self.fail_on: dict[str, Exception] = {}
        self.calls: list[str] = []

    def doors(self) -> Doors:
        return Doors(self, self, self, self, self, self.clock, NAMES)

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name in self.fail_on:
            raise self.fail_on[name]

    def _break(self, region: FakeRegion) -> None:
        region.broken_at = self.clock.now if region.broken_at is None else region.broken_at

    def _mend(self, region: FakeRegion) -> None:
        if region.broken_at is not None:
            region.broken_at, self.changed_at = None, self.clock.now

    # drills.doors.Regions

    def _pid(self, region: str) -> int:
        return (NAMES.index(region) + 1) * 100

    def pids(self, region: str) -> tuple[int, ...]:
        base = self._pid(region)
        return (base, base + 1, base + 2) if self.regions[region].alive else ()

    def signal(self, pids: Sequence[int], sign: signal.Signals) -> None:
        for pid in pids:
            region = self.regions[NAMES[pid // 100 - 1]]
            self._called(f"signal {sign.name}")
            if sign is signal.SIGKILL:
                region.alive, region.frozen = False, False
            else:
                region.frozen = sign is signal.SIGSTOP
            self._break(region) if sign is not signal.SIGCONT else self._mend(region)

    def frozen(self, region: str) -> tuple[int, ...]:
        return self.pids(region) if self.regions[region].frozen else ()

    async def up(self, region: str) -> None:
        self._called(f"up {region}")
        if self.never_up:
            raise WeirError(f"region {region}", "could not be started: no disk space")
        await self.clock.sleep(2.0)
        found = self.regions[region]
        if not found.alive:
            found.alive, found.ups = True, found.ups + 1
            self._mend(found)

    async def not_ready(self, region: str) -> str:
        found = self.regions[region]
        if not found.alive:
            return "not running"
        return "frozen" if found.frozen else f"{min(found.held)} is held" if found.held else ""

    # drills.doors.Processes

    async def status(self, region: str) -> Mapping[str, ProcessSeen]:
        found = self.regions[region]
        assert found.alive, "a dead supervisor can't be asked"
        names = (
            "consul",
            "control-plane",
            "ingress",
            "mesh-gateway",
            "chat-stable-0",
            "chat-stable-0-sidecar",
        )
        return {
            name: ProcessSeen(None, "held", False) if name in found.held else ProcessSeen(7, "ready", True)
            for name in names
        }

    async def hold(self, region: str, process: str) -> None:
        self._called(f"hold {process}")
        self.regions[region].held.add(process)

    async def release(self, region: str, process: str) -> None:
        self._called(f"release {process}")
        self.regions[region].held.discard(process)

    # drills.doors.Packets

    def subnet(self, region: str) -> str:
        return f"127.20.{NAMES.index(region) + 1}.0/24"

    async def check(self) -> str:
        return "" if self.may_set_rules else "setting packet rules needs CAP_NET_ADMIN"

    async def run(self, *args: str) -> str:
        """Enough of iptables: -N, -X, -F, -A, -I, -D and -S with its refusals."""
        self._called(f"iptables {args[0]}")
        verb, chain = args[0], args[1] if len(args) > 1 else ""
        if verb == "-S":
            return "\n".join(["-P OUTPUT ACCEPT", *self.rules])
        if verb == "-N":
            assert f"-N {chain}" not in self.rules, "the chain is there already"
            self.rules.append(f"-N {chain}")
        elif verb in ("-A", "-I"):
            self.rules.append(f"-A {' '.join(args[1:])}")
            if verb == "-I":
                self._break(self._cut_region())
        elif verb == "-D":
            self._mend(self._cut_region())
            self.rules.remove(f"-A {' '.join(args[1:])}")
        elif verb == "-F":
            self.rules = [r for r in self.rules if not r.startswith(f"-A {chain} ")]
        elif verb == "-X":
            assert not [r for r in self.rules if r.startswith(f"-A {chain} ") or r.endswith(f"-j {chain}")]
            self.rules.remove(f"-N {chain}")
        return ""

    def _cut_region(self) -> FakeRegion:
        """The region whose subnet is in every rule by subnet."""
        wide = [r for r in self.rules if r.count("/24") == 2]
        name = next(n for n in NAMES if all(self.subnet(n) in r for r in wide))
        return self.regions[name]

    # drills.doors.Orders

    async def evacuate(self, service: str, region: str, why: str) -> None:
        self._called(f"evacuate {region}")
        self.evacuated.add(region)
        self.changed_at = self.clock.now

    async def restore(self, service: str, region: str, why: str) -> None:
        self._called(f"restore {region}")
        self.evacuated.discard(region)
        self.changed_at = self.clock.now

    async def read_key(self, region: str, key: str) -> bytes | None:
        return self.keys.get(key)

    async def write_key(self, region: str, key: str, value: bytes | None) -> None:
        self._called(f"write {key}")
        self.changed_at = self.clock.now
        if value is None:
            self.keys.pop(key, None)
        else:
            self.keys[key] = value

    # drills.doors.Statuses

    def _gone(self, now: float) -> set[str]:
        """Regions that the survivors' control planes know to be lost."""
        lost = {
            n
            for n, r in self.regions.items()
            if r.broken_at is not None and now - r.broken_at >= self.detect_s
        }
        return lost | self.evacuated

    async def documents(self, service: str) -> Mapping[str, Mapping[str, Any]]:
        assert service == SERVICE
        gone = self._gone(self.clock.now)
        canary = float(self.keys.get("config/traffic/canary-weight", b"0"))
        living = {n: w for n, w in SHARES.items() if n not in gone}
        broken = [r.broken_at + self.detect_s for r in self.regions.values() if r.broken_at is not None]
        seen = max([t for t in broken if t <= self.clock.now] + [self.changed_at])
        found = {}
        for region, state in self.regions.items():
            if not state.alive or state.frozen or "consul" in state.held:
                continue
            slices = []
            for name, weight in living.items():
                share = round(weight * 10_000 / sum(living.values()))
                slices += [[name, "canary", share * canary], [name, "stable", share * (1 - canary)]]
            found[region] = {
                "service": SERVICE,
                "region": region,
                "canary_weight": {"value": canary, "key": "config/traffic/canary-weight"},
                "slices": slices,
                "evacuated": sorted(self.evacuated),
                "applied": True,
                "version": f"v{seen}-{canary}-{sorted(gone)}",
                "path": {n: "down" if n in gone else "up" for n in NAMES},
                "times": {
                    "seen": START + seen,
                    "decided": START + seen + 0.001,
                    "pushed": START + seen + 0.003,
                    "applied": START + seen + 0.010,
                },
            }
        return found

    async def retries(self, service: str) -> int | None:
        return 0


class FakeGenerator:
    """Open-loop load in virtual time: every request that is due up to now has happened.

    bears: answers per second, the rest waits. queue: so many wait, the others are refused (429). stall: from
    when to when nothing is answered, seconds from the start of the load.
    """

    def __init__(
        self,
        world: FakeWorld,
        *,
        seed: int = 1,
        broken: bool = False,
        bears: float = math.inf,
        queue: float = math.inf,
        stall: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        self._world, self._rng, self._broken = world, Random(seed), broken
        self._bears, self._queue, self._stall = bears, queue, stall
        self._waiting: list[tuple[float, Request]] = []
        self._started_at = self._free_at = 0.0
        self._load: Load | None = None
        self._ingresses: Sequence[str] = ()
        self._next = 0.0
        self.started = self.stopped = 0

    async def start(self, load: Load, service: str, ingresses: Sequence[str]) -> None:
        self._load, self._ingresses, self._next = load, ingresses, self._world.clock.now
        self._started_at = self._world.clock.now
        self.started += 1

    async def take(self) -> Sequence[Request]:
        made: list[Request] = []
        while self._load is not None and self._next <= self._world.clock.now and not self._broken:
            made.append(self._request(self._load, self._next, len(made)))
            self._next += 1 / self._load.rate
        self._waiting += [self._served(request) for request in made]
        return self._ended(self._world.clock.now)

    async def stop(self) -> Sequence[Request]:
        rest = [*await self.take(), *self._ended(math.inf)]
        self._load = None
        self.stopped += 1
        return rest

    def _served(self, request: Request) -> tuple[float, Request]:
        """When it ends, and how, in a queue before one server."""
        due = request.due_s - START
        if (self._free_at - due) * self._bears > self._queue:
            return due, replace(request, ok=False, status=429, latency_s=0.001, error="HTTP 429")
        self._free_at = max(self._free_at, due) + 1 / self._bears
        end = max(due + request.latency_s, self._free_at)
        first, last = (self._started_at + s for s in self._stall)
        end = last if first <= end < last else end
        return end, replace(request, latency_s=end - due)

    def _ended(self, now: float) -> list[Request]:
        ended = [request for end, request in self._waiting if end <= now]
        self._waiting = [(end, request) for end, request in self._waiting if end > now]
        return ended

    def _request(self, load: Load, at: float, number: int) -> Request:
        world, rng = self._world, self._rng
        gone = world._gone(at)
        living = [n for n in NAMES if n not in gone]
        region = rng.choices(living, [SHARES[n] for n in living])[0]
        canary = float(world.keys.get("config/traffic/canary-weight", b"0"))
        stage = "canary" if rng.random() < canary else "stable"
        state = world.regions[region]
        lost = state.broken_at is not None and at >= state.broken_at
        stream = rng.random() < load.streams
        failed = lost and state.broken_at is not None and at < state.broken_at + world.lost_s
        if lost and not failed:
            region = next(n for n in living if world.regions[n].broken_at is None)
        latency = max(0.001, rng.gauss(0.012, 0.002)) + (0.03 if lost else 0.0)
        return Request(
            due_s=START + at,
            sent_s=START + at,
            latency_s=latency,
            ok=not failed,
            status=503 if failed else 200,
            ingress=self._ingresses[number % len(self._ingresses)],
            region="" if failed else region,
            stage="" if failed else stage,
            stream=stream,
            attempts=2 if lost else 1,
            error="upstream connect error" if failed else "",
        )


class Quiet:
    """Progress that remembers."""

    def __init__(self) -> None:
        self.phases: list[str] = []
        self.said: list[str] = []
        self.on_phase: dict[str, Any] = {}

    def phase(self, name: str, why: str) -> None:
        self.phases.append(name)
        if name in self.on_phase:
            self.on_phase[name]()

    def tick(self, recorder: Recorder) -> None:
        pass

    def say(self, text: str) -> None:
        self.said.append(text)
