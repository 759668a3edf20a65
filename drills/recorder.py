"""Collects what happens during a drill into a History.

Law: records, never judges. One `tick` reads everything new once: the load's requests and the status
documents. What can't be read at a moment is simply not in the record.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from drills.doors import Doors, Generator
from drills.history import Event, History, Mark, Request, StatusSeen
from regions.cli.errors import WeirError


@dataclass(slots=True)
class Recorder:
    """Mutable on purpose: it grows while the drill runs; `history()` gives the frozen record."""

    target: str
    service: str
    doors: Doors
    generator: Generator
    requests: list[Request] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    statuses: list[StatusSeen] = field(default_factory=list)
    retried: int | None = None
    _retries_before: int | None = None
    _latest: dict[str, StatusSeen] = field(default_factory=dict)

    def mark(self, mark: Mark, what: str = "", region: str = "", at_s: float | None = None) -> float:
        """Note a moment (now, unless told otherwise) and return it."""
        at = self.doors.clock.time() if at_s is None else at_s
        self.events.append(Event(at, mark, what, region))
        return at

    async def tick(self) -> None:
        """Read everything that is new. Never raises for a world that is broken."""
        self.requests.extend(await self.generator.take())
        at = self.doors.clock.time()
        for region, document in (await self.doors.statuses.documents(self.service)).items():
            try:
                seen = StatusSeen.from_document(document, at)
            except ValueError:
                continue  # not our format: whoever needs it will say "no control plane answered"
            if not self._same(self._latest.get(region), seen):
                self._latest[region] = seen
                self.statuses.append(seen)

    @staticmethod
    def _same(old: StatusSeen | None, new: StatusSeen) -> bool:
        return old is not None and (old.shares, old.applied, old.times, old.canary, old.path) == (
            new.shares,
            new.applied,
            new.times,
            new.canary,
            new.path,
        )

    def latest(self) -> dict[str, StatusSeen]:
        """The newest status of each region that was read so far."""
        return dict(self._latest)

    async def count_retries(self) -> None:
        """First call: remember Envoy's counters. Later calls: what was added since."""
        try:
            now = await self.doors.statuses.retries(self.service)
        except WeirError:
            now = None
        if self._retries_before is None:
            self._retries_before = now
        elif now is not None:
            # A gateway that was started anew counts from zero, so a smaller sum says nothing.
            self.retried = now - self._retries_before if now >= self._retries_before else None

    def history(self) -> History:
        """The record so far, in order of time."""
        return History(
            target=self.target,
            requests=tuple(sorted(self.requests, key=lambda r: r.due_s)),
            events=tuple(sorted(self.events, key=lambda e: e.at_s)),
            statuses=tuple(self.statuses),
            retried_by_stat=self.retried,
        )
