"""One control plane: news comes in, a tick decides, resources go out, the status follows.

Law: keeps nothing that it can't rebuild from Consul. `tick()` is the whole of its work and is called by the
loop only; news lands in the inputs and wakes it. A bad snapshot is refused, the last good one stays.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from mesh import fold
from mesh.clock import Clock
from mesh.controlplane import decide
from mesh.controlplane.decide import Decision, Inputs
from mesh.controlplane.metrics import PlaneMetrics
from mesh.controlplane.status import Times
from mesh.fold import Event, Facts
from mesh.model import Proxy, SnapshotError
from mesh.traffic.epochs import Record
from mesh.traffic.plan import ConfigPage
from mesh.traffic.slots import Layout
from mesh.xds import resources
from mesh.xds.resource_set import DanglingReference, ResourceSet

log = logging.getLogger("weir.plane")


@dataclass(slots=True)
class Wakes:
    """Who waits for what. tick: decide. carry: news between regions. status: something to write."""

    tick: asyncio.Event = field(default_factory=asyncio.Event)
    carry: asyncio.Event = field(default_factory=asyncio.Event)
    status: asyncio.Event = field(default_factory=asyncio.Event)


class Plane:
    """The state of one control plane. A Sink for Sources."""

    def __init__(self, facts: Facts, clock: Clock, metrics: PlaneMetrics) -> None:
        self.inputs = Inputs(facts)
        self.decision: Decision | None = None
        self.sets: Mapping[str, ResourceSet] = {}
        self.times = Times()
        self.lacking: tuple[str, ...] = ("everything",)
        self.error = ""
        self.wakes = Wakes()
        self.clock, self.metrics = clock, metrics
        self._news_since: float | None = None

    # -- news ---------------------------------------------------------------------------------------------

    def fact(self, event: Event) -> None:
        self._news(replace(self.inputs, facts=fold.fold(self.inputs.facts, event, self.clock.monotonic())))

    def page(self, page: ConfigPage) -> None:
        self._news(replace(self.inputs, page=page))
        self.wakes.carry.set()

    def records(self, region: str, records: dict[str, Record]) -> None:
        if region == self.inputs.facts.region:
            self._news(replace(self.inputs, records=records))
        else:
            self.inputs = replace(self.inputs, others={**self.inputs.others, region: records})
        self.wakes.carry.set()

    def down(self, regions: frozenset[str]) -> None:
        """The regions whose path doesn't answer."""
        self._news(replace(self.inputs, down=regions))

    def layouts(self, layouts: Mapping[str, Layout]) -> None:
        """The layouts found in Consul at start; later ones come from the ticks."""
        self._news(replace(self.inputs, layouts=layouts))

    def _news(self, inputs: Inputs) -> None:
        self.inputs = inputs
        if self._news_since is None:
            self._news_since = self.clock.time()
        self.wakes.tick.set()

    # -- the tick -----------------------------------------------------------------------------------------

    def tick(self) -> Mapping[str, ResourceSet] | None:
        """Decide on all news. New resource sets by proxy id, or None when there is nothing to send."""
        for event in fold.overdue(self.inputs.facts, self.clock.monotonic()):
            self.fact(event)
        self.lacking = decide.missing(self.inputs)
        if self.lacking:
            return None
        seen, self._news_since = self._news_since or self.clock.time(), None
        try:
            decision = decide.decide(self.inputs)
        except SnapshotError as error:
            self._refuse(str(error))
            return None
        decided = self.clock.time()
        self.error, self.decision = "", decision
        self.inputs = replace(self.inputs, layouts={s: p.layout for s, p in decision.plans.items()})
        self.sets = self._build(decision)
        self.times = Times(seen, decided, self.clock.time())
        self.metrics.tick_seconds.observe(self.times.pushed - seen)
        return self.sets

    def _build(self, decision: Decision) -> dict[str, ResourceSet]:
        """Resources of every proxy; one whose set contradicts itself keeps its last good one."""
        out: dict[str, ResourceSet] = {}
        for proxy in decision.snapshot.proxies.values():
            try:
                made = resources.build(decision.snapshot, proxy)
            except (DanglingReference, SnapshotError, ValueError) as error:
                self._refuse(f"{proxy.id}: {error}")
                if proxy.id in self.sets:
                    out[proxy.id] = self.sets[proxy.id]
                continue
            out[proxy.id] = made
        return out

    def _refuse(self, reason: str) -> None:
        self.error = reason
        self.metrics.refused.inc()
        log.error("refused, the last good state stays: %s", reason)

    def proxies(self) -> Mapping[str, Proxy]:
        """The proxies registered now, for the door of the ADS server."""
        return self.inputs.facts.proxies or {}
