"""The loop that brings the own datacenter's config to what the regions agree on.

Law: decides nothing (decide.writes does) and keeps nothing; wakes, hears the others before a claim, writes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random
from typing import Any

from mesh.clock import Clock
from mesh.consul.errors import ConsulError
from mesh.consul.watch import Watch
from mesh.controlplane import carry, decide
from mesh.controlplane.carry import Store
from mesh.controlplane.plane import Plane

log = logging.getLogger("weir.carry")
RETRY_S = 0.25
PUSH_FIRST_S = 0.005
"""Pause before the writes: the push of the same news goes out first, and a burst is carried as one."""
SILENT_AFTER = 3
"""Failures in a row after which a region's Consul counts as silent."""


class Carrier:
    """watches: those of mesh.controlplane.sources by name, empty before they are made."""

    def __init__(
        self,
        store: Store,
        plane: Plane,
        watches: Callable[[], Mapping[str, Watch[Any]]],
        clock: Clock,
        rng: Random,
    ) -> None:
        self._store, self._plane, self._watches = store, plane, watches
        self._clock, self._rng = clock, rng

    async def run(self) -> None:
        """Until cancelled."""
        wake = self._plane.wakes.carry
        while True:
            await wake.wait()
            await self._clock.sleep(PUSH_FIRST_S)
            wake.clear()
            try:
                await self.once()
            except ConsulError as error:
                log.warning("carrying: %s", error.why)
                await self._clock.sleep(RETRY_S * (1 + self._rng.random()))
                wake.set()

    async def once(self) -> None:
        """Do what is to be written now. Raises ConsulError when the own Consul doesn't answer."""
        inputs = self._plane.inputs
        records = dict(inputs.records) if inputs.records is not None else None
        if carry.needs_marker(inputs.page, records):
            await carry.make_marker(self._store)
        writes = decide.writes(inputs, self._clock.time())
        if any(write.claim for write in writes):
            others = await carry.hear(self._store, self._hearable(), inputs.others)
            writes = decide.writes(replace(inputs, others=others), self._clock.time())
        for write in writes:
            if await carry.carry(self._store, write):
                self._plane.metrics.carried.labels("claimed" if write.claim else "adopted").inc()

    def _hearable(self) -> list[str]:
        """Other regions, but for those whose Consul is silent for good: only waiting would come of asking.

        One failure means nothing: a process that wakes up from a freeze finds all its watches overdue.
        """
        facts, watches = self._plane.inputs.facts, self._watches()
        far = (r for r in facts.regions.names if r != facts.region)
        return [r for r in far if (w := watches.get(f"epochs/{r}")) is not None and w.failures < SILENT_AFTER]
