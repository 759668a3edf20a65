"""The scheduler's core under any history: places, blocks and the order hold after every step."""

from __future__ import annotations

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.batching.admission import limits
from services.batching.core import Core
from services.batching.model import BatchingSettings, Late, Phase, Ticket
from services.faults import Refused
from tests.unit.tickets import facts


class Histories(RuleBasedStateMachine):
    """Any order of comings and goings; a model of one dictionary stands beside the core."""

    @initialize(
        sequences=st.sampled_from([0, 1, 3, 8]),
        continuous=st.booleans(),
        blocks=st.sampled_from([0, 6, 20]),
        batch=st.integers(1, 5),
        lanes=st.integers(1, 3),
    )
    def begin(self, sequences: int, continuous: bool, blocks: int, batch: int, lanes: int) -> None:
        of = facts(sequences, continuous=continuous, kv_tokens=blocks * 16)
        self.how = BatchingSettings(
            batch_size=batch, concurrency=lanes, queue_limit=12, first_token_s=9, idle_s=7, ageing_s=2
        )
        self.it: Core[Ticket] = Core(self.how, limits(of, self.how))
        self.now, self.all, self.begun = 0.0, list[Ticket](), dict[int, int]()
        self.retried: dict[int, int] = {}
        self.continuous = continuous

    def phase(self, *phases: Phase) -> list[Ticket]:
        return [t for t in self.all if t.phase in phases]

    def pump(self) -> None:
        before, lanes = self.it.running, dict[int, int]()
        for one in self.it.start(self.now):
            assert one.phase is Phase.PLACED
            self.begun[one.number] = self.begun.get(one.number, 0) + 1
            assert self.begun[one.number] <= 1 + self.retried.get(one.number, 0)
            waiting = self.phase(Phase.QUEUED)
            assert all((one.key, one.number) < (t.key, t.number) for t in waiting)
            before += 1
            lanes[one.lane] = lanes.get(one.lane, 0) + 1
            assert before <= self.it.places or not self.continuous
            assert lanes[one.lane] <= self.it.batch or self.continuous
        waiting = sorted(self.phase(Phase.QUEUED), key=lambda t: (t.key, t.number))
        if waiting and self.continuous:
            # Nobody waits without a reason.
            full = self.it.running >= self.it.places
            assert full or self.it.kv_blocks + waiting[0].need > self.it.limits.blocks

    @rule(
        rank=st.integers(0, 2),
        blocks=st.integers(1, 6),
        due=st.sampled_from([0.5, 3.0, math.inf]),
        count=st.integers(1, 3),
    )
    def submit(self, rank: int, blocks: int, due: float, count: int) -> None:
        for _ in range(count):
            one = Ticket(blocks, rank, self.now, self.now + due)
            if self.it.queued + self.it.delayed >= self.how.queue_limit:
                with pytest.raises(Refused):
                    self.it.submit(one, self.now)
                assert one.phase is Phase.NEW
            else:
                self.it.submit(one, self.now)
                self.all.append(one)
        self.pump()

    @precondition(lambda self: self.phase(Phase.PLACED))
    @rule(data=st.data())
    def served(self, data: st.DataObject) -> None:
        self.it.finish(data.draw(st.sampled_from(self.phase(Phase.PLACED))), self.now)
        self.pump()

    @precondition(lambda self: self.all)
    @rule(data=st.data())
    def cancelled(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.all))
        finished = self.it.finished + (one.phase is not Phase.GONE)
        self.it.finish(one, self.now)
        self.it.finish(one, self.now)
        assert self.it.finished == finished  # once, whatever happens
        self.pump()

    @precondition(lambda self: self.phase(Phase.PLACED))
    @rule(data=st.data(), pause=st.floats(0, 2))
    def failed(self, data: st.DataObject, pause: float) -> None:
        one = data.draw(st.sampled_from(self.phase(Phase.PLACED)))
        if self.it.full:  # no room to wait for another try: its fault is told
            self.it.finish(one, self.now)
        else:
            self.it.again(one, self.now + pause)
            self.retried[one.number] = self.retried.get(one.number, 0) + 1
        self.pump()

    @rule(level=st.integers(0, 3))
    def throttled(self, level: int) -> None:
        self.it.throttle(0.5**level, 1.5**level)
        self.pump()

    @rule(s=st.sampled_from([0.001, 0.02, 0.3, 4.0]))
    def time_passes(self, s: float) -> None:
        self.now += s
        for one, late in self.it.due(self.now):
            assert late is Late.DEADLINE
            assert one.deadline <= self.now
            if one.phase is Phase.PLACED:
                self.it.finish(one, self.now)
        assert all(t.deadline > self.now for t in self.all if t.phase is not Phase.GONE)
        self.pump()

    @invariant()
    def books_are_kept(self) -> None:
        it, placed = self.it, self.phase(Phase.PLACED)
        assert it.running == len(placed)
        assert it.kv_blocks == sum(t.need for t in placed) <= it.limits.blocks
        assert it.queued == len(self.phase(Phase.QUEUED)) == sum(it.by_rank)
        assert it.delayed == len(self.phase(Phase.DELAYED))
        assert it.submitted == len(self.all) == it.finished + it.running + it.queued + it.delayed
        assert it.running <= it.limits.places
        assert it.queued + it.delayed <= self.how.queue_limit, "those that back off count, and come back"

    def teardown(self) -> None:
        """All that are left get their turn: nobody was lost."""
        if not hasattr(self, "it"):
            return
        for _ in range(10 * len(self.all) + 10):
            for one in self.phase(Phase.PLACED):
                self.it.finish(one, self.now)
            self.pump()
            if not self.phase(Phase.PLACED):
                if (at := self.it.next_at()) == math.inf:
                    break
                self.time_passes(max(0.0, at - self.now))
        assert {t.phase for t in self.all} <= {Phase.GONE}
        assert (self.it.running, self.it.queued, self.it.delayed, self.it.kv_blocks) == (0, 0, 0, 0)


TestHistories = Histories.TestCase


TestHistories.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
