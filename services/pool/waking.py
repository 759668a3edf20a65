"""asleep → waking → running: room first, the engine, the fixed prompt, then the mesh.

Law: nothing is admitted that was not verified. What fails is quarantined and started cold at once; without
room nothing is touched and it sleeps on.
"""

from __future__ import annotations

import asyncio

from regions.cli.errors import UsageError, WeirError
from services.devices.door import Binding, find, places
from services.faults import DeviceLost
from services.lifecycle import State
from services.pool.coldstart import BROKEN, ColdStart
from services.pool.place import NoRoom, choose, reachable
from services.pool.rebuild import rebuild, same_answer
from services.pool.standing import Standing
from services.pool.steps import Stopwatch, Trouble


class Waking:
    """Of one instance."""

    def __init__(self, standing: Standing, cold: ColdStart) -> None:
        self._s, self._p, self._memory, self._cold = standing, standing.parts, standing.memory, cold

    async def run(self, watch: Stopwatch, device: str) -> None:
        where = await self._named(device)
        was = self._s.life.state
        if was in (State.QUARANTINED, State.DEAD):
            await self._cold.again(watch, f"it was {was}", where)
            return
        if was is not State.COLD:
            self._s.life.to(State.WAKING)
            with watch.step("tell the mesh"):
                await self._s.tell()
        try:
            with watch.step("room") as notes:
                where = await self._where(where, notes)
        except (NoRoom, WeirError, DeviceLost) as error:
            code = "no_room" if isinstance(error, NoRoom) else "device"
            if was is not State.COLD:
                await self._s.become(State.ASLEEP, str(error))
            raise Trouble(code, f"{error}; it sleeps on") from error
        if was is State.COLD:
            await self._cold.again(watch, f"it was {was}", where)
            return
        try:
            await self._up(watch, where)
        except BROKEN as error:
            why = str(error) or type(error).__name__
            await self._s.become(State.QUARANTINED, why)
            await self._cold.again(watch, why, where)
            return
        self._s.life.to(State.RUNNING)
        await self._s.admit(watch)

    async def _named(self, device: str) -> Binding | None:
        if not device:
            return None
        try:
            if self._p.devices is None:
                raise UsageError(f"device {device!r}", "this executor knows no devices")
            return await asyncio.to_thread(self._p.devices.bind, device)
        except (WeirError, DeviceLost) as error:
            raise Trouble("device", str(error)) from error

    async def _where(self, wanted: Binding | None, notes: list[str]) -> Binding | None:
        """Where to rebuild, None to wake at home. Raises NoRoom."""
        devices, own = self._p.devices, self._p.engine.binding.uuid
        if devices is None or not (own or wanted):
            notes.append("no device of its own")
            return None
        every = places(await asyncio.to_thread(devices.list))
        seen = reachable(own, every, slices=self._p.slices)
        if wanted is not None:
            # Whoever names a device wants that one: only its memory is looked at.
            target = find(seen, wanted.uuid)
            chosen = choose(wanted.uuid, (target,) if target else (), self._memory.need, busy=1.0)
            notes.append(chosen.reason)
            return None if wanted.uuid == own else wanted
        chosen = choose(own, seen, self._memory.need, self._p.settings.busy)
        notes.append(chosen.reason)
        return devices.bind(chosen.device) if chosen.moved else None

    async def _up(self, watch: Stopwatch, where: Binding | None) -> None:
        p = self._p
        if where is None:
            with watch.step("engine wakes") as notes:
                async with asyncio.timeout(p.settings.wake_limit_s):
                    await p.engine.wake()
                if p.engine.facts().wake_proves:
                    notes.append("answers its fixed prompt as before")
                    return
        else:
            with watch.step("close"):
                await self._cold.close()
            await rebuild(p, self._memory, where, watch, "rebuild")
        with watch.step("fixed prompt"):
            await same_answer(self._memory.answer, p.engine, p.settings.ask_limit_s)
