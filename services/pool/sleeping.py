"""running → draining → asleep, and the ways it may fail.

Law: asleep means asleep: Consul was told and nothing came any more before the engine sleeps, its memory was
given back after. An engine that didn't sleep serves on only if it answers as before.
"""

from __future__ import annotations

import asyncio

from regions.cli.errors import WeirError
from services.faults import EngineFault
from services.lifecycle import State
from services.pool.coldstart import BROKEN, ColdStart
from services.pool.observe import Held, contradiction, observe, told
from services.pool.standing import Standing
from services.pool.steps import Stopwatch, Trouble
from services.pool.verify import ask, garbage, kept_back
from services.registration import Drain, quiet

CLOSED = 0
"""The level of sleep that every engine has: it is closed."""
SLACK = 0.9
"""What the driver counts as ours, the CUDA context too, moves by a little of its own."""


class Sleeping:
    """Of one instance."""

    def __init__(self, standing: Standing, cold: ColdStart) -> None:
        self._s, self._p, self._memory, self._cold = standing, standing.parts, standing.memory, cold
        self._before = Held(0)

    async def run(self, watch: Stopwatch, level: int) -> None:
        levels = self._p.engine.facts().sleep_levels
        if level not in (*levels, CLOSED):
            has = ", ".join(map(str, levels)) or "none"
            raise Trouble("level", f"the engine has no sleep level {level}; it has {has}, and 0 closes it")
        self._s.life.to(State.DRAINING, "going to sleep")
        try:
            await self._drained(watch)
            if level == CLOSED:
                await self._closed(watch)
                return
            with watch.step("engine sleeps") as notes:
                await self._park(level, notes)
        except (Trouble, asyncio.CancelledError):
            await self._s.back_to_traffic()
            raise
        except BROKEN as error:
            await self._after_failed_sleep(watch, error)
        await self._asleep(watch, level)

    async def _closed(self, watch: Stopwatch) -> None:
        """Any engine can be closed, also one that knows no sleep; waking is then a cold start."""
        self._memory.held, self._memory.asleep = self._p.engine.stats().memory_bytes, 0
        self._s.life.to(State.COLD, "closed")
        with watch.step("close"):
            await self._cold.close()
        with watch.step("tell Consul"):
            await self._s.tell()

    async def _drained(self, watch: Stopwatch) -> None:
        with watch.step("tell the mesh"):
            if not await self._s.tell():
                raise Trouble("consul", "Consul could not be told: the mesh would go on sending")
        describing = asyncio.ensure_future(self._memory.describe())
        try:
            with watch.step("drain"):
                await self._quiet(self._p.settings.drain)
            with watch.step("fixed prompt") as notes:
                await self._learn(notes)
            with watch.step("describe the model") as notes:
                await self._described(describing, notes)
        finally:
            describing.cancel()
            await asyncio.gather(describing, return_exceptions=True)

    async def _described(self, describing: asyncio.Future[None], notes: list[str]) -> None:
        """A folder that can't be read keeps nobody awake: the snapshot then says less."""
        try:
            await describing
        except WeirError as error:
            notes.append(f"not described: {error.what}: {error.why}")

    async def _quiet(self, how: Drain) -> None:
        instance = self._p.instance
        left = await quiet(how, lambda: instance.in_flight, self._p.clock)
        if left:
            raise Trouble("still_running", f"{left} requests still ran after {how.deadline_s:g} s")

    async def _learn(self, notes: list[str]) -> None:
        try:
            notes += await self._memory.learn()
        except BROKEN as error:
            if self._p.engine.stats().dead:
                self._p.instance.failed(str(error))
            raise Trouble("engine", f"the engine can't answer the fixed prompt: {error}") from error

    async def _park(self, level: int, notes: list[str]) -> None:
        """Latecomers may arrive between the drain and the sleep: then the engine refuses, and we wait on."""
        clock, engine = self._p.clock, self._p.engine
        end = clock.monotonic() + self._p.settings.drain.deadline_s
        while True:
            self._memory.held = engine.stats().memory_bytes
            self._before = await self._observe()
            try:
                await engine.sleep(level)
                return
            except RuntimeError as error:
                late = isinstance(error, EngineFault) or not self._p.instance.in_flight
                if late or clock.monotonic() > end:
                    raise
                notes.append("waited for a latecomer")
                await self._quiet(Drain(end - clock.monotonic(), 0.0))

    async def _asleep(self, watch: Stopwatch, level: int) -> None:
        with watch.step("memory given back") as notes:
            self._memory.asleep = self._p.engine.stats().memory_bytes
            after, least = await self._observe(), self._p.settings.given_back
            wrong = kept_back(self._memory.held, self._memory.asleep, least)
            wrong = wrong or contradiction(self._memory.need, self._before, after, least * SLACK)
            notes.append(wrong or f"{self._memory.need} bytes; {told(self._before, after)}")
        if wrong:
            await self._close_instead(wrong)
        self._s.life.to(State.ASLEEP)
        self._s.slept_at = int(self._p.clock.time())
        with watch.step("snapshot") as notes:
            notes.append(f"{await self._write(level)} bytes")
        with watch.step("tell Consul"):
            await self._s.tell()

    async def _observe(self) -> Held:
        return await asyncio.to_thread(observe, self._p.devices, self._p.engine.binding.uuid)

    async def _write(self, level: int) -> int | str:
        try:
            return await self._memory.write(level)
        except WeirError as error:
            # It sleeps all the same; only a rebuild elsewhere needs the file.
            return f"not written ({error.why}): 0"

    async def _close_instead(self, wrong: str) -> None:
        """Memory is what sleeping is for: what a parked engine keeps, a closed one gives back."""
        self._s.life.to(State.QUARANTINED, wrong)
        await self._cold.close()
        self._s.life.to(State.COLD, wrong)
        await self._s.tell()
        raise Trouble("sleep_failed", f"{wrong}; the engine was closed instead")

    async def _after_failed_sleep(self, watch: Stopwatch, error: BaseException) -> None:
        """Nobody knows what a failed sleep has left: the engine serves on only if it answers as before."""
        assert self._memory.answer is not None
        wrong = ""
        try:
            with watch.step("fixed prompt after the failure"):
                got = await ask(self._p.engine, self._p.settings.ask_limit_s)
                wrong = garbage(self._memory.answer, got)
        except BROKEN as second:
            wrong = str(second)
        if not wrong:
            await self._s.back_to_traffic()
            raise Trouble("engine", f"the engine did not sleep ({error}); it serves on") from error
        self._s.life.to(State.QUARANTINED, str(error))
        await self._s.tell()
        await self._cold.again(watch, f"it did not sleep ({error}) and then: {wrong}")
        raise Trouble("sleep_failed", f"the engine did not sleep ({error}); it was started anew")
