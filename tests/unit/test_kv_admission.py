"""The scheduler and the accounting agree: who may start, who waits, who can never be served, what is held.

services/batching books plain numbers, for speed; the ledger is the same rule written to be read. Whatever
comes and goes, both must say the same.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.batching.admission import limits, need
from services.batching.core import Core
from services.batching.model import BatchingSettings, Ticket
from services.engine import EngineFacts
from services.faults import Refused
from tests.kv_ledger import Fits, KvLedger, Never, admit

HOW = BatchingSettings(queue_limit=1000)


@given(
    blocks=st.integers(1, 30),
    block=st.integers(1, 20),
    context=st.sampled_from((0, 50, 200)),
    window=st.sampled_from((0, 1, 30)),
    chunk=st.integers(1, 40),
    steps=st.lists(st.tuples(st.integers(1, 120), st.integers(1, 120), st.booleans()), max_size=40),
)
def test_what_the_scheduler_books_is_what_the_ledger_books(
    blocks: int, block: int, context: int, window: int, chunk: int, steps: list[tuple[int, int, bool]]
) -> None:
    facts = EngineFacts(
        "e",
        context=context,
        kv_tokens=blocks * block,
        kv_block=block,
        kv_window=window,
        kv_chunk=chunk,
    )
    room = limits(facts, HOW)
    core: Core[Ticket] = Core(HOW, room)
    ledger = KvLedger(blocks, block, window, chunk)
    waiting: list[tuple[Ticket, int]] = []
    running: list[tuple[Ticket, int]] = []
    for now, (prompt, answer, leave) in enumerate(steps):
        whole = prompt + answer
        verdict = admit(whole, ledger, context)
        if isinstance(verdict, Never):
            with pytest.raises(Refused):
                need(prompt, answer, room)
            continue
        ticket = Ticket(need(prompt, answer, room), 0, float(now))
        assert ticket.need == verdict.blocks
        core.submit(ticket, float(now))
        waiting.append((ticket, whole))
        if leave and running:
            gone, _ = running.pop(0)
            core.finish(gone, float(now))
            ledger.free(str(id(gone)))
        begun = core.start(float(now))
        # First come, first served: the head starts exactly when the ledger says that it fits.
        while waiting and isinstance(admit(waiting[0][1], ledger), Fits):
            first, size = waiting.pop(0)
            ledger.reserve(str(id(first)), size)
            running.append((first, size))
            assert begun.pop(0) is first
        assert begun == []
        assert core.kv_blocks == ledger.used
        assert core.queued == len(waiting)
    for ticket, _ in running:
        core.finish(ticket, 1e6)
        ledger.free(str(id(ticket)))
        for first in core.start(1e6):
            core.finish(first, 1e6)
    assert ledger.used == 0
