"""What the next step computes: one token for every running sequence, and chunks of new prompts.

Law: pure; decides, and books blocks. A sequence joins and leaves at any step. When blocks run out, the
sequence that joined last gives all of its own back and waits at the head of the queue, to be computed again
(recompute costs a prefill; copying out would cost as much on these sizes, and need memory elsewhere).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from services.kv.shape import blocks_for, ceil_div
from services.llama.blocks import Blocks, blocks_dropped
from services.llama.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """`count` tokens of a sequence from position `start` on; `last`: a token is sampled behind it."""

    sequence: Sequence
    start: int
    count: int

    @property
    def last(self) -> bool:
        return self.start + self.count == len(self.sequence.tokens)


@dataclass(frozen=True, slots=True)
class Plan:
    """decodes: one pending token each, few blocks first. chunks: more, or the first of a sequence."""

    decodes: tuple[Sequence, ...] = ()
    chunks: tuple[Chunk, ...] = ()

    @property
    def sampled(self) -> tuple[Sequence, ...]:
        """Those that get a token, in the order of the runner's rows."""
        return (*self.decodes, *(c.sequence for c in self.chunks if c.last))

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        return (*self.decodes, *(c.sequence for c in self.chunks))


class Planner:
    """Waiting and running sequences over one pool of blocks. chunk: prompt tokens computed in one step."""

    def __init__(self, blocks: Blocks, *, most: int, chunk: int, window: int = 0) -> None:
        self.blocks, self.most, self._chunk, self._window = blocks, most, chunk, window
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0

    def fits(self, tokens: int) -> bool:
        """Whether a sequence of this size can ever run here."""
        return self._peak(tokens) <= self.blocks.count

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def plan(self) -> Plan:
        """The next step; nothing in it when nothing can be done. Blocks for it are booked."""
        decodes: list[Sequence] = []
        budget, before = self._chunk, self.preemptions
        # Oldest first: preemption takes from the end, so that those behind have not been looked at yet.
        for sequence in tuple(self.running):
            if sequence.computed and sequence.pending == 1 and self._grow(sequence, 1):
                decodes.append(sequence)
        chunks: list[Chunk] = []
        for sequence in tuple(self.running):
            if sequence.pending > 1 or not sequence.computed:
                budget -= self._continue(sequence, budget, chunks)
        # Who was preempted in this very plan must not come back in it: it may stand in `decodes` still.
        while budget > 0 and self.preemptions == before and self._admit():
            budget -= self._continue(self.running[-1], budget, chunks)
        # A sequence may have been preempted after it was planned.
        alive = set(map(id, self.running))
        # By width: the runner puts sequences of like length together.
        decodes = sorted((s for s in decodes if id(s) in alive), key=lambda s: len(s.blocks))
        return Plan(
            tuple(decodes),
            tuple(c for c in chunks if id(c.sequence) in alive),
        )

    def done(self, plan: Plan) -> None:
        """The step was computed (before sampled tokens are pushed): K and V are in the pool."""
        for sequence in plan.decodes:
            sequence.computed += 1
        for chunk in plan.chunks:
            chunk.sequence.computed += chunk.count
        if self._window:
            for sequence in plan.sequences:
                self._trim(sequence)

    def remove(self, sequence: Sequence) -> None:
        """It is finished, failed or cancelled: everything it holds is free. Fine if it isn't here."""
        self._release(sequence)
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def reap(self) -> list[Sequence]:
        """Remove and tell those that were cancelled."""
        gone = [s for s in (*self.running, *self.waiting) if s.cancelled]
        for sequence in gone:
            self.remove(sequence)
        return gone

    def everyone(self) -> Iterable[Sequence]:
        return (*self.running, *self.waiting)

    def _peak(self, tokens: int) -> int:
        return blocks_for(tokens, self.blocks.size, self._window, self._chunk)

    def _admit(self) -> bool:
        """Let the head of the queue run, if all of its tokens so far will find room."""
        if not self.waiting or len(self.running) >= self.most:
            return False
        if self._peak(len(self.waiting[0].tokens)) > self.blocks.free:
            return False
        self.running.append(self.waiting.popleft())
        return True

    def _continue(self, sequence: Sequence, budget: int, chunks: list[Chunk]) -> int:
        """Plan as much of its prompt as goes into the budget; how many tokens that is."""
        count = min(sequence.pending, budget)
        if count <= 0 or sequence not in self.running or not self._grow(sequence, count):
            return 0
        chunks.append(Chunk(sequence, sequence.computed, count))
        return count

    def _grow(self, sequence: Sequence, count: int) -> bool:
        """Blocks for `count` more tokens; preempts the youngest until there are enough. False when it was
        itself the youngest: then it waits."""
        if sequence not in self.running:
            return False
        wanted = ceil_div(sequence.computed + count, self.blocks.size) - sequence.dropped
        missing = wanted - len(sequence.blocks)
        while missing > self.blocks.free:
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is sequence:
                return False
        sequence.blocks += self.blocks.take(max(0, missing))
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._release(sequence)
        self.running.remove(sequence)
        self.waiting.appendleft(sequence)
        self.preemptions += 1

    def _release(self, sequence: Sequence) -> None:
        self.blocks.give(sequence.blocks)
        sequence.blocks, sequence.computed, sequence.dropped = [], 0, 0

    def _trim(self, sequence: Sequence) -> None:
        """Give back the blocks that fell out of the window."""
        keep_from = blocks_dropped(sequence.computed, self.blocks.size, self._window)
        fallen = keep_from - sequence.dropped
        if fallen > 0:
            self.blocks.give(sequence.blocks[:fallen])
            sequence.blocks = sequence.blocks[fallen:]
            sequence.dropped = keep_from
