"""The scheduler's core: who waits, who has a place, what happens next and when.

Law: pure; `now` is an argument (seconds of one monotonic clock, never going back), nothing here waits. Each
call is one transition of a ticket:

    submit: NEW -> QUEUED      start: QUEUED -> PLACED      again: PLACED -> DELAYED
    due: DELAYED -> QUEUED; QUEUED, DELAYED -> GONE (late)   finish: QUEUED, PLACED, DELAYED -> GONE

A static engine is given whole batches: a lane closes when its batch leaves and opens when it is empty; a
batch leaves when it is full, when its oldest has waited for the delay, or when nothing else runs. A
continuous one takes a sequence into any free place, so a place that comes free is its next one's at once. KV
goes in order: who doesn't fit now holds up those behind, else the long ones would wait for ever.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import Generic, TypeVar

from services.batching.admission import Rate, retry_after_s
from services.batching.model import (
    DELAYED,
    GONE,
    NEW,
    PLACED,
    QUEUED,
    WAIT_BUCKETS_S,
    BatchingSettings,
    Late,
    Limits,
    Ticket,
)
from services.batching.order import Alarms, Queue
from services.faults import Refused

T = TypeVar("T", bound=Ticket)


class Core(Generic[T]):
    """running, queued, delayed: tickets by phase; kv_blocks: held by running ones. slack: somebody looked for
    work and found none since it was last set to False.
    """

    def __init__(self, how: BatchingSettings, limits: Limits) -> None:
        self._how, self._poll_s = how, min(how.first_token_s, how.idle_s)
        self._queue: Queue[T] = Queue()
        self._alarms: Alarms[T] = Alarms()
        self._drained = Rate()
        self._arrivals = 0
        self._lanes: list[int] = []
        self._oldest, self._known, self._stuck = math.inf, True, False
        self.slack = True
        self.running = self.queued = self.delayed = self.kv_blocks = 0
        self.submitted = self.placed = self.finished = self.retries = self.deadline_misses = self.hangs = 0
        self.by_rank = [0] * (len(how.classes) + 1)
        self.waits, self.wait_s = [0] * (len(WAIT_BUCKETS_S) + 1), 0.0
        self.limits = limits
        self.throttle(1.0, 1.0)

    def throttle(self, capacity: float, delay: float) -> None:
        """Batches of `capacity` of the full size, `delay` times the delay. Who runs stays."""
        limits = self.limits
        self.batch = max(1, math.ceil(limits.batch * capacity))
        whole = limits.lanes * self.batch
        self.places = max(1, math.ceil(limits.places * capacity)) if limits.continuous else whole
        self.delay_s = self._how.max_delay_ms / 1000 * delay
        while len(self._lanes) < limits.lanes:
            self._lanes.append(0)

    def submit(self, ticket: T, now: float) -> None:
        """Raises Refused (429) when the queue is full."""
        if self.full:
            waiting = self.queued + self.delayed
            wait = retry_after_s(waiting, self._drained.per_s(now))
            message = f"{waiting} requests are waiting already"
            raise Refused(429, "queue_full", message, retry_after_s=wait)
        self._arrivals = ticket.number = self._arrivals + 1
        # A better class is worth so many seconds of waiting; beyond them the older one goes first.
        ticket.key = ticket.arrived + ticket.rank * self._how.ageing_s
        self.submitted += 1
        self._enqueue(ticket, now)
        if ticket.deadline != math.inf:
            self._alarms.arm(ticket, ticket.deadline)

    def start(self, now: float) -> list[T]:
        """Those that get a place now, in order."""
        begun: list[T] = []
        if self.limits.continuous:
            self._fill(begun, 0, self.places - self.running, now)
        else:
            for lane, busy in enumerate(self._lanes):
                if not busy and self._leaves(now):
                    self._fill(begun, lane, self.batch, now)
            # Due, and yet it stands: only a place or KV that comes free can help, not the time.
            self._stuck = 0 in self._lanes and self._leaves(now)
        if self.has_room:
            self.slack = True
        return begun

    @property
    def has_room(self) -> bool:
        """Whether a place is free and nobody wants it."""
        return not self.queued and self.running < self.places

    @property
    def full(self) -> bool:
        """Whether nobody may wait any more, for a place or for another try: who backs off comes back."""
        return self.queued + self.delayed >= self._how.queue_limit

    def finish(self, ticket: T, now: float) -> None:
        """It is over, whatever it was: place and KV are free, the queue forgets it. Fine to call twice."""
        phase = ticket.phase
        if phase is GONE or phase is NEW:
            return
        ticket.phase = GONE
        self._alarms.disarm(ticket)
        self.finished += 1
        if phase is PLACED:
            self._free(ticket)
            self._drained.count(now)
        elif phase is QUEUED:
            self._dequeue(ticket)
            self._queue.forget()
        else:
            self.delayed -= 1

    def again(self, ticket: T, at: float) -> None:
        """Its place is free; at `at` it is back in the queue, where its arrival puts it."""
        if ticket.phase is not PLACED:
            raise RuntimeError(f"a ticket in the phase {ticket.phase.name} can't be tried again")
        self._free(ticket)
        ticket.phase, ticket.retry_at, ticket.stall_at = DELAYED, at, math.inf
        self.delayed += 1
        self.retries += 1
        self._alarms.arm(ticket, at)

    def due(self, now: float) -> list[tuple[T, Late]]:
        """Who is late. Those that wait are GONE; those with a place keep it until `finish`."""
        late: list[tuple[T, Late]] = []
        for ticket in self._alarms.due(now):
            if ticket.deadline <= now:
                self.deadline_misses += 1
                late.append((ticket, Late.DEADLINE))
                if ticket.phase is not PLACED:
                    self.finish(ticket, now)
            elif ticket.phase is PLACED and ticket.stall_at <= now:
                self.hangs += 1
                late.append((ticket, Late.SILENT))
            else:
                self._rearm(ticket, now)
        return late

    def next_at(self) -> float:
        """When `due` or `start` should be called again if nothing else happens; math.inf: never."""
        at = self._alarms.next_at()
        if not self.limits.continuous and self.queued and not self._stuck and 0 in self._lanes:
            at = min(at, self._since() + self.delay_s)
        return at

    def abandon(self, now: float) -> list[T]:
        """All that have no place, in order; they are GONE."""
        waiting = [*self._queue.all(), *(t for t in self._alarms.all() if t.phase is DELAYED)]
        for ticket in waiting:
            self.finish(ticket, now)
        return waiting

    def _rearm(self, ticket: T, now: float) -> None:
        if ticket.phase is PLACED:
            # Polled, since a stall is put off without telling: never later than any limit may end.
            self._alarms.arm(ticket, min(ticket.deadline, ticket.stall_at, now + self._poll_s))
            return
        if ticket.phase is DELAYED and ticket.retry_at <= now:
            self.delayed -= 1
            ticket.retry_at = math.inf
            self._enqueue(ticket, now)
        self._alarms.arm(ticket, min(ticket.deadline, ticket.retry_at))

    def _enqueue(self, ticket: T, now: float) -> None:
        ticket.phase, ticket.queued_at = QUEUED, now
        self._queue.add(ticket)
        self.queued += 1
        self.by_rank[ticket.rank] += 1
        if now < self._oldest:
            self._oldest = now

    def _dequeue(self, ticket: T) -> None:
        self.queued -= 1
        self.by_rank[ticket.rank] -= 1
        if not self.queued:
            self._oldest, self._known = math.inf, True
        elif ticket.queued_at <= self._oldest:
            self._known = False  # found out when asked for: nobody asks on behalf of a continuous engine

    def _leaves(self, now: float) -> bool:
        """Whether a batch leaves for a lane that is empty."""
        if not self.queued:
            return False
        return self.queued >= self.batch or not self.running or now >= self._since() + self.delay_s

    def _since(self) -> float:
        """Since when the oldest in the queue waits."""
        if not self._known:
            self._oldest, self._known = self._queue.oldest(), True
        return self._oldest

    def _fill(self, begun: list[T], lane: int, room: int, now: float) -> None:
        queue, alarms, poll, most = self._queue, self._alarms, now + self._poll_s, self.limits.blocks
        while room > 0 and self.queued:
            ticket = queue.first()
            if ticket is None or self.kv_blocks + ticket.need > most:
                return
            queue.pop()
            self._dequeue(ticket)
            ticket.phase, ticket.lane = PLACED, lane
            self._lanes[lane] += 1
            self.running += 1
            self.kv_blocks += ticket.need
            self.placed += 1
            waited = now - ticket.queued_at
            self.wait_s += waited
            self.waits[bisect_left(WAIT_BUCKETS_S, waited)] += 1
            alarms.arm(ticket, poll)
            begun.append(ticket)
            room -= 1

    def _free(self, ticket: T) -> None:
        self.running -= 1
        self._lanes[ticket.lane] -= 1
        self.kv_blocks -= ticket.need
