"""The way back of an instance that can't simply wake: close its engine, build a new one, verify, serve.

Law: used where the straight way failed (quarantined, dead) or is closed (cold). Nothing is admitted that was
not verified; what fails stays quarantined and says why. A device that is lost is left.
"""

from __future__ import annotations

import asyncio
import logging

from regions.cli.errors import WeirError
from services.devices.door import Binding, places
from services.faults import DeviceLost, EngineFault
from services.lifecycle import State
from services.pool.place import NoRoom, choose, reachable
from services.pool.rebuild import rebuild, same_answer
from services.pool.standing import Standing
from services.pool.steps import Stopwatch, Trouble

BROKEN = (EngineFault, WeirError, RuntimeError, OSError, TimeoutError, ValueError)
"""What an engine may raise; anything else is a bug of ours and goes through."""

log = logging.getLogger("weir.pool")


class ColdStart:
    """Of one instance."""

    def __init__(self, standing: Standing) -> None:
        self._s, self._p, self._memory = standing, standing.parts, standing.memory

    async def again(self, watch: Stopwatch, why: str, binding: Binding | None = None) -> None:
        """`run`, with Consul told how it ended. why: the straight way was not taken. Raises Trouble."""
        watch.recovered = why
        try:
            await self.run(watch, binding)
        finally:
            if self._s.life.state is not State.RUNNING:
                await self._s.tell()
        await self._s.admit(watch)

    async def run(self, watch: Stopwatch, binding: Binding | None = None) -> None:
        """From COLD, QUARANTINED or DEAD to RUNNING in the lifecycle; Consul is the caller's.

        Raises Trouble: quarantined, or dead where there is no device left.
        """
        life, why = self._s.life, ""
        where = binding or self._p.engine.binding
        for number in range(self._p.settings.cold_tries):
            try:
                life.to(State.STARTING, "cold start")
                await self._once(watch, where)
                life.to(State.RUNNING)
                return
            except DeviceLost as error:
                why = str(error)
                where = await self._elsewhere(where, why)
            except BROKEN as error:
                why = str(error) or type(error).__name__
                log.warning("cold start %d failed: %s", number + 1, why)
            if life.can(State.QUARANTINED):
                life.to(State.QUARANTINED, why)
        raise Trouble("quarantined", f"the cold start failed: {why}")

    async def _once(self, watch: Stopwatch, where: Binding) -> None:
        p = self._p
        with watch.step("close"):
            await self.close()
        await rebuild(p, self._memory, where, watch, "build and load")
        with watch.step("fixed prompt"):
            expected = self._memory.answer
            got = await same_answer(expected, p.engine, p.settings.ask_limit_s)
            self._memory.answer = expected or got

    async def close(self) -> None:
        """Close the engine; one that is broken or hangs is left behind, and that stands in the log."""
        try:
            async with asyncio.timeout(self._p.settings.close_limit_s):
                await self._p.engine.close()
        except (TimeoutError, EngineFault, RuntimeError, OSError) as error:
            log.warning("the old engine did not close: %s", error or type(error).__name__)

    async def _elsewhere(self, lost: Binding, why: str) -> Binding:
        """Another device than the lost one. Raises Trouble when there is none: then the instance is dead."""
        devices = self._p.devices
        if devices is None or not lost.uuid:
            self._s.life.die(why)
            raise Trouble("device_lost", why)
        every = places(await asyncio.to_thread(devices.list))
        seen = [d for d in reachable(lost.uuid, every, slices=self._p.slices) if d.uuid != lost.uuid]
        try:
            choice = choose(lost.uuid, seen, self._memory.need, self._p.settings.busy)
            return devices.bind(choice.device)
        except (NoRoom, DeviceLost) as error:
            self._s.life.die(f"{why}; {error}")
            raise Trouble("device_lost", f"{why}; {error}") from error
