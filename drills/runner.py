"""Runs a drill: gate, load, inject, hold, heal, settle. It records; drills.checks judges afterwards.

Law: whatever happens between the first injection and the end - an exception, Ctrl-C, a fault that could
only half be injected - healing is tried, and proven by measuring. One phase is one function; time passes
only in drills.pace, by the clock that was handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from drills import healing
from drills.active import Active, ActiveFile
from drills.doors import Doors, Generator
from drills.faults.base import Fault, FaultSpec
from drills.history import Mark, StatusSeen
from drills.model import Action, Ingresses, Scenario
from drills.outcome import Finding, Outcome, Phase
from drills.pace import TICK_S, Interrupted, Pace, Progress, Stop
from drills.recorder import Recorder
from drills.steady import before_load, same_plan, under_load
from drills.strain import Strain, drowning, refusing
from regions.cli.errors import Refused, WeirError


@dataclass(frozen=True, slots=True)
class Plan:
    """All that one run needs."""

    id: str
    by: str
    started: str
    scenario: Scenario
    doors: Doors
    generator: Generator
    build: Callable[[FaultSpec, Doors], Fault]
    active: ActiveFile
    say: Progress
    stop: Stop


class Drill:
    """One run. Call `run` once."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._doors, self._clock = plan, plan.doors, plan.doors.clock
        self._rec = Recorder(plan.scenario.target, plan.scenario.service, plan.doors, plan.generator)
        self._pace = Pace(plan.doors.clock, self._rec, plan.say, plan.stop)
        self._faults: list[Fault] = []
        self._done: list[str] = []
        self._phases: list[Phase] = []
        self._steady: list[Finding] = []
        self._healing = healing.Healing()
        self._touched = False
        self._strain: Strain | None = None

    async def run(self) -> Outcome:
        """The whole drill. Raises WeirError (mostly Refused) only before anything was touched.

        Also for a load that the service doesn't bear: that says nothing about the mesh, so it is no verdict.
        """
        faults = [(a, await self._prepared(a)) for a in self._plan.scenario.actions]
        problem, interrupted = "", False
        try:
            problem = await self._gate() or await self._load() or await self._break_and_heal(faults)
            if self._done:
                await self._phase(
                    "settle", "load goes on after the healing", self._plan.scenario.phases.settle_s
                )
        except Interrupted:
            interrupted = True
            self._rec.mark(Mark.INTERRUPTED, "stopped by the person at the terminal")
        except WeirError as error:
            problem = str(error)
        finally:
            await self._end()
        if self._strain is not None and self._rec.requests and not interrupted:
            load = f"load of {self._strain.rate:g} requests/s"
            raise Refused(load, self._strain.why, self._strain.way_out(self._plan.scenario.fitted))
        return Outcome(
            self._rec.history(),
            healed=self._healing.healed,
            problem=problem,
            interrupted=interrupted,
            steady=tuple(self._steady),
            done=tuple(self._done),
            proofs=self._healing.proofs,
            by_hand=self._healing.by_hand,
            phases=tuple(self._phases),
        )

    async def _prepared(self, action: Action) -> Fault:
        scenario = self._plan.scenario
        spec = FaultSpec(action.do, scenario.target, scenario.service, self._plan.id, action.params)
        fault = self._plan.build(spec, self._doors)
        await fault.prepare()
        return fault

    async def _gate(self) -> str:
        """Wait for the steady state; "" when it holds, else why nothing is broken."""
        started, deadline = self._clock.time(), self._clock.monotonic() + self._plan.scenario.phases.gate_s
        self._plan.say.phase("gate", "is the world steady? otherwise nothing is broken")
        while True:
            await self._pace.tick()
            found = await before_load(self._plan.scenario, self._doors)
            if all(f.held for f in found) or self._clock.monotonic() >= deadline:
                break
            await self._pace.until(self._clock.monotonic() + TICK_S)
        self._steady.extend(found)
        self._phases.append(Phase("gate", started, self._clock.time()))
        return _not_steady(found)

    async def _load(self) -> str:
        """Load before the fault; "" when the steady state holds under it too."""
        scenario, names = self._plan.scenario, self._doors.names
        ingresses = {
            Ingresses.ALL: names,
            Ingresses.SURVIVING: tuple(n for n in names if n != scenario.target),
            Ingresses.TARGET: (scenario.target,),
        }[scenario.load.ingresses]
        await self._rec.count_retries()
        await self._plan.generator.start(scenario.load, scenario.service, ingresses)
        started = self._rec.mark(Mark.LOAD, f"{scenario.load.rate:g} requests/s to {', '.join(ingresses)}")
        await self._phase("load", "steady state under load", scenario.phases.load_s)
        self._strain = await self._drowning(started)
        found = under_load(scenario, self._rec.history())
        self._steady.extend(found)
        if problem := _not_steady(found):
            now, rate = self._clock.time(), scenario.load.rate
            self._strain = self._strain or refusing(self._rec.requests, rate, started, now)
            return problem
        return self._strain.why if self._strain else ""

    async def _drowning(self, started: float) -> Strain | None:
        """Whether the service keeps up. A stall gets as long again to pass as the load has lasted."""
        rate, deadline = (
            self._plan.scenario.load.rate,
            self._clock.monotonic() + self._plan.scenario.phases.load_s,
        )
        while found := drowning(self._rec.requests, rate, started, self._clock.time()):
            if self._clock.monotonic() >= deadline:
                break
            await self._pace.until(self._clock.monotonic() + TICK_S)
        self._phases[-1] = replace(self._phases[-1], end_s=self._clock.time())
        return found

    async def _break_and_heal(self, faults: Sequence[tuple[Action, Fault]]) -> str:
        """Inject, hold, heal; then what comes after the healing, undone too; then the world as before."""
        before, problem = self._rec.latest(), ""
        try:
            try:
                problem = await self._inject_and_hold(faults)
            finally:
                await self._heal(Mark.BACK)
            if not problem and self._healing.healed:
                problem = await self._after_heal()
        finally:
            if self._healing.healed:
                await self._heal(Mark.HEAL)
            await self._restored(before)
        return problem

    async def _inject_and_hold(self, faults: Sequence[tuple[Action, Fault]]) -> str:
        start, started, problem = self._clock.monotonic(), self._clock.time(), ""
        target, hold_s = self._plan.scenario.target, self._plan.scenario.phases.hold_s
        self._plan.say.phase("inject", "; ".join(a.do for a, _ in faults) + f" on {target}")
        for number, (action, fault) in enumerate(sorted(faults, key=lambda row: row[0].at_s)):
            await self._pace.until(start + action.at_s)
            problem = await self._inject(fault, Mark.ACTION if number else Mark.INJECT)
            if problem:
                return problem
        self._phases.append(Phase("inject", started, self._clock.time()))
        await self._phase("hold", "the fault stays", start + hold_s - self._clock.monotonic())
        return ""

    async def _inject(self, fault: Fault, mark: Mark) -> str:
        """One injection, written down before it is done. "" when it worked."""
        plan = self._plan
        specs = tuple(f.spec for f in (*self._faults, fault))
        plan.active.write(Active(plan.id, plan.scenario.name, plan.by, plan.started, specs))
        self._faults.append(fault)
        self._touched = True
        self._rec.mark(mark, fault.spec.do, fault.spec.target)
        try:
            told = await self._pace.during(fault.inject())
        except Interrupted:
            raise
        except Exception as error:
            # Whatever it was: the half-made fault is healed by the caller, and the report says so.
            return f"{fault.spec.do} could not be injected: {error}"
        self._rec.mark(Mark.INJECTED, told, fault.spec.target)
        self._done.append(told)
        plan.say.say(told)
        return ""

    async def _heal(self, mark: Mark) -> None:
        """Undo all that is broken, newest first, and prove it; a second Ctrl-C abandons it.

        mark: BACK for the drill's own faults (noted at the moment of the proof).
        """
        if not self._faults:
            return
        started, faults = self._clock.time(), tuple(self._faults)
        self._plan.say.phase("heal", "; ".join(f.spec.do for f in faults) + " undone, and proven")
        if mark is Mark.BACK:
            self._rec.mark(Mark.HEAL)
        limit, say = self._plan.scenario.phases.heal_s, self._plan.say.say
        try:
            made = await self._pace.during(healing.heal(faults, self._clock, limit, say), healing=True)
        except Interrupted:
            made = healing.abandoned(faults)
        self._healing = self._healing.then(made)
        if made.healed:
            self._faults.clear()
            if mark is Mark.BACK:
                self._rec.mark(Mark.BACK, made.proofs[0], at_s=made.at_s)
        self._phases.append(Phase("heal", started, self._clock.time()))

    async def _after_heal(self) -> str:
        """What must work again right after the healing (a weight change), timed until it is applied."""
        for action in self._plan.scenario.after_heal:
            fault = await self._prepared(action)
            await self._pace.tick()
            old = {region: status.version for region, status in self._rec.latest().items()}
            problem = await self._inject(fault, Mark.CHANGE)
            if problem:
                return problem
            # Long enough to see a slow change end; whether it was fast enough is for the judge.
            deadline = self._clock.monotonic() + self._plan.scenario.phases.gate_s
            while (applied := _all_applied(self._rec.latest(), old)) is None:
                if self._clock.monotonic() >= deadline:
                    return ""
                await self._pace.until(self._clock.monotonic() + TICK_S)
            self._rec.mark(Mark.CHANGED, "acknowledged by the proxies of every region", at_s=applied)
        return ""

    async def _restored(self, before: Mapping[str, StatusSeen]) -> None:
        """Wait until the touched world is as it was: regions ready, plans the same. Then forget the drill."""
        if not self._touched or not self._healing.healed:
            return
        deadline = self._clock.monotonic() + self._plan.scenario.phases.heal_s
        while True:
            await self._pace.tick()
            why = await same_plan(before, self._rec.latest(), self._doors)
            if not why or self._clock.monotonic() >= deadline or self._plan.stop.abandoned.is_set():
                break
            await self._clock.sleep(TICK_S)
        self._healing = self._healing.with_world(why)
        self._rec.mark(Mark.HEALED, why or "all regions ready, every traffic plan as before")
        if not why:
            self._plan.active.clear()

    async def _end(self) -> None:
        self._rec.mark(Mark.END)
        self._rec.requests.extend(await self._plan.generator.stop())
        await self._rec.count_retries()

    async def _phase(self, name: str, why: str, seconds: float) -> None:
        started = self._clock.time()
        self._plan.say.phase(name, why)
        await self._pace.until(self._clock.monotonic() + max(0.0, seconds))
        self._phases.append(Phase(name, started, self._clock.time()))


def _not_steady(found: Sequence[Finding]) -> str:
    bad = [f"{f.probe}: {f.detail}" for f in found if not f.held]
    return "no steady state, so nothing was broken: " + "; ".join(bad) if bad else ""


def _all_applied(latest: Mapping[str, StatusSeen], old: Mapping[str, str]) -> float | None:
    """When the last region applied a plan of another version than `old`; None while one has not."""
    if not latest or any(not s.applied or s.version == old.get(r) for r, s in latest.items()):
        return None
    return max(s.times.applied for s in latest.values())
