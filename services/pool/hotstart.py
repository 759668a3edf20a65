"""Hot stop and hot start of one instance: drain, sleep, wake, verify; each step timed.

Law: asleep means asleep: Consul was told and nothing came any more before the engine sleeps, memory was given
back after. Awake means the same as before: room first, the fixed prompt's answer before the mesh hears of it.
What fails says so; nothing is called done that is not. One verb at a time, and a caller that goes away
doesn't stop it half way.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from services.lifecycle import IllegalChange, State
from services.pool.coldstart import ColdStart
from services.pool.parts import Parts
from services.pool.sleeping import Sleeping
from services.pool.standing import Standing
from services.pool.steps import Outcome, Stopwatch, Trouble
from services.pool.waking import Waking

log = logging.getLogger("weir.pool")


class HotPool:
    """The verbs. memory: what it remembers asleep. last: what the last verb did. watchers: told of each."""

    def __init__(self, parts: Parts) -> None:
        self.parts, self._standing = parts, Standing(parts)
        self._life, self.memory = self._standing.life, self._standing.memory
        self._cold = ColdStart(self._standing)
        self._sleeping = Sleeping(self._standing, self._cold)
        self._waking = Waking(self._standing, self._cold)
        self.last: Outcome | None = None
        self.watchers: list[Callable[[Outcome], None]] = []
        self._task: asyncio.Task[Outcome] | None = None

    async def sleep(self, level: int = 1) -> Outcome:
        """running → draining → asleep. Codes of failure: wrong_state, busy, level, consul, still_running,
        engine (it runs on), sleep_failed (it is cold, or quarantined)."""
        return await self._one("sleep", lambda watch: self._sleeping.run(watch, level))

    async def wake(self, device: str = "") -> Outcome:
        """asleep → waking → running, on another device when `device` names it or its own is too busy; from
        cold, quarantined and dead by a cold start. Codes: wrong_state, busy, device, no_room, quarantined,
        device_lost."""
        return await self._one("wake", lambda watch: self._waking.run(watch, device))

    async def cool(self) -> Outcome:
        """asleep → cold: the engine is closed."""
        return await self._one("cool", self._cool)

    async def close(self) -> None:
        """End a verb that is under way; the engine itself is its owner's to close."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))

    @property
    def slept_at(self) -> int:
        """Unix seconds when it fell asleep, 0 while it doesn't sleep."""
        return self._standing.slept_at

    async def _one(self, verb: str, act: Callable[[Stopwatch], Awaitable[None]]) -> Outcome:
        if self._task is not None and not self._task.done():
            return Outcome(verb, self._life.state, "busy", "another verb is under way")
        self._task = asyncio.ensure_future(self._run(verb, act))
        return await asyncio.shield(self._task)

    async def _run(self, verb: str, act: Callable[[Stopwatch], Awaitable[None]]) -> Outcome:
        watch = Stopwatch(self.parts.clock)
        code = error = ""
        try:
            await act(watch)
        except Trouble as trouble:
            code, error = trouble.code, str(trouble)
        except IllegalChange as illegal:
            code, error = "wrong_state", str(illegal)
        except Exception as bug:
            # Nobody knows how far it came: out of traffic until a cold start is verified.
            log.exception("%s failed as it should not", verb)
            code, error = "bug", f"{type(bug).__name__}: {bug}"
            if self._life.can(State.QUARANTINED):
                await self._standing.become(State.QUARANTINED, error)
        self.last = watch.outcome(verb, self._life.state, code, error)
        _log(self.last)
        for told in self.watchers:
            told(self.last)
        return self.last

    async def _cool(self, watch: Stopwatch) -> None:
        self._life.to(State.COLD, "too many sleep on this device")
        with watch.step("close"):
            await self._cold.close()
        self._standing.slept_at = 0
        with watch.step("tell Consul"):
            await self._standing.tell()


def _log(last: Outcome) -> None:
    """One line for each verb: the only trace of a sleep that nobody watched."""
    how = "" if last.ok else f"{last.code}: {last.error}; "
    recovered = f" by a cold start, because: {last.recovered}" if last.recovered else ""
    level = logging.INFO if last.ok else logging.WARNING
    log.log(level, "%s: %s%s after %.3f s%s", last.verb, how, last.state, last.seconds, recovered)
