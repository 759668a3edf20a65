"""Who is next, and when something is next: two heaps whose entries die where they lie.

Law: pure. A ticket is never searched for: its entry is recognised as dead when it comes up, and all dead ones
are swept out once they are the majority, so that adding and removing stay cheap for any mix.
"""

from __future__ import annotations

import math
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

from services.batching.model import QUEUED, Ticket

T = TypeVar("T", bound=Ticket)
SWEEP_FROM = 64
"""So many dead entries are nobody's business."""


class Queue(Generic[T]):
    """Tickets in the phase QUEUED, smallest (key, number) first. A ticket stands in it once at most."""

    __slots__ = ("_dead", "_heap")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, T]] = []
        self._dead = 0

    def __len__(self) -> int:
        return len(self._heap) - self._dead

    def add(self, ticket: T) -> None:
        heappush(self._heap, (ticket.key, ticket.number, ticket))

    def first(self) -> T | None:
        heap = self._heap
        while heap:
            ticket = heap[0][2]
            if ticket.phase is QUEUED:
                return ticket
            heappop(heap)
            self._dead -= 1
        return None

    def pop(self) -> None:
        """Take out what `first` showed."""
        heappop(self._heap)

    def forget(self) -> None:
        """One of its tickets has left the phase QUEUED otherwise."""
        self._dead += 1
        if self._dead > SWEEP_FROM and self._dead * 2 > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[2].phase is QUEUED]
            heapify(self._heap)
            self._dead = 0

    def oldest(self) -> float:
        """When the one that waits longest was queued; math.inf of none."""
        entries = (entry[2] for entry in self._heap)
        return min((t.queued_at for t in entries if t.phase is QUEUED), default=math.inf)

    def all(self) -> list[T]:
        return [entry[2] for entry in sorted(self._heap) if entry[2].phase is QUEUED]


class Alarms(Generic[T]):
    """One alarm a ticket at most, at `ticket.armed`. Putting one off costs nothing: it is found too early and
    set again.
    """

    __slots__ = ("_heap", "_live")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, T]] = []
        self._live = 0

    def arm(self, ticket: T, at: float) -> None:
        """Wake for this ticket at `at`, or earlier where it is armed for earlier already."""
        if at >= ticket.armed:
            return
        self._live += ticket.armed == math.inf
        ticket.armed = at
        heappush(self._heap, (at, ticket.number, ticket))
        if len(self._heap) > SWEEP_FROM + 2 * self._live:
            self._heap = [entry for entry in self._heap if entry[2].armed == entry[0]]
            heapify(self._heap)

    def disarm(self, ticket: T) -> None:
        if ticket.armed != math.inf:
            ticket.armed = math.inf
            self._live -= 1

    def next_at(self) -> float:
        heap = self._heap
        while heap and heap[0][2].armed != heap[0][0]:
            heappop(heap)
        return heap[0][0] if heap else math.inf

    def all(self) -> list[T]:
        return [entry[2] for entry in sorted(self._heap) if entry[2].armed == entry[0]]

    def due(self, now: float) -> list[T]:
        """Those whose alarm has come, in order; they are no longer armed."""
        found: list[T] = []
        while self.next_at() <= now:
            ticket = heappop(self._heap)[2]
            self.disarm(ticket)
            found.append(ticket)
        return found
