"""The block allocator and the planner: nobody's blocks twice, everything back at the end."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.kv.shape import blocks_for
from services.llama.blocks import Blocks, NoBlocks, blocks_dropped
from services.llama.planner import Plan, Planner
from services.llama.sequence import Sequence


def test_blocks_are_taken_and_given_once() -> None:
    blocks = Blocks(4, 16)
    taken = blocks.take(3)
    assert len(set(taken)) == 3
    assert (blocks.used, blocks.free) == (3, 1)
    with pytest.raises(NoBlocks):
        blocks.take(2)
    assert blocks.free == 1
    blocks.give(taken[:2])
    with pytest.raises(ValueError, match="not all taken"):
        blocks.give(taken)
    assert blocks.used == 1, "nothing was given back by the call that failed"


def test_the_same_block_twice_in_one_call_is_refused() -> None:
    blocks = Blocks(4, 16)
    block = blocks.take(1)[0]
    with pytest.raises(ValueError):
        blocks.give([block, block])
    assert blocks.used == 1


@given(st.lists(st.integers(-6, 6), max_size=60))
def test_free_and_used_always_add_up(moves: list[int]) -> None:
    blocks, held = Blocks(8, 4), list[int]()
    for move in moves:
        if move > blocks.free:
            with pytest.raises(NoBlocks):
                blocks.take(move)
        elif move >= 0:
            held += blocks.take(move)
        else:
            gone, held = held[:-move], held[-move:]
            blocks.give(gone)
        assert len(set(held)) == len(held) == blocks.used
        assert blocks.used + blocks.free == 8
    blocks.give(held)
    assert blocks.used == 0


@given(st.integers(1, 120), st.integers(1, 9), st.integers(1, 40), st.integers(1, 30))
def test_the_peak_is_never_exceeded(tokens: int, size: int, window: int, chunk: int) -> None:
    computed = 0
    while computed < tokens:
        step = min(chunk, tokens - computed)
        held = blocks_for(computed + step, size) - blocks_dropped(computed, size, window)
        assert held <= blocks_for(tokens, size, window, chunk)
        computed += step
        # The next query still sees all of its window.
        assert blocks_dropped(computed, size, window) * size <= max(0, computed - window + 1)


def _check(planner: Planner, plan: Plan) -> None:
    """What must hold between planning and computing."""
    held = [b for s in planner.running for b in s.blocks]
    assert len(set(held)) == len(held) == planner.blocks.used, "a block belongs to one sequence"
    assert not any(s.blocks or s.computed for s in planner.waiting)
    planned = list(plan.sequences)
    assert len(set(map(id, planned))) == len(planned), "a sequence is in a step once"
    size = planner.blocks.size
    for sequence in planned:
        assert sequence in planner.running
    for sequence in plan.decodes:
        assert sequence.pending == 1
        assert (sequence.dropped + len(sequence.blocks)) * size > sequence.computed
    for chunk in plan.chunks:
        assert chunk.start == chunk.sequence.computed
        assert (chunk.sequence.dropped + len(chunk.sequence.blocks)) * size >= chunk.start + chunk.count


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_every_history_ends_with_all_done_and_no_block_held(data: st.DataObject) -> None:
    size, window = data.draw(st.integers(1, 5)), data.draw(st.sampled_from([0, 0, 1, 6]))
    chunk, most = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 4))
    planner = Planner(Blocks(data.draw(st.integers(1, 14)), size), most=most, chunk=chunk, window=window)
    todo = [Sequence([0] * data.draw(st.integers(1, 12)), 0, 1) for _ in range(data.draw(st.integers(0, 8)))]
    for sequence in todo:
        sequence.prompt, sequence.limit = len(sequence.tokens), data.draw(st.integers(1, 9))
    todo = [s for s in todo if planner.fits(s.prompt + s.limit)]
    wanted, finished = list(todo), list[Sequence]()
    for _ in range(2000):
        if todo and (data.draw(st.booleans()) or not planner.running):
            planner.add(todo.pop())
        if data.draw(st.integers(0, 20)) == 0 and planner.running:
            planner.running[-1].cancelled = True
            wanted = [s for s in wanted if not s.cancelled]
            planner.reap()
        plan = planner.plan()
        _check(planner, plan)
        assert plan.sequences or not (planner.running or planner.waiting), "no standstill"
        assert len(planner.running) <= most
        assert sum(c.count for c in plan.chunks) <= chunk
        planner.done(plan)
        for sequence in plan.sampled:
            if sequence.push(0):
                planner.remove(sequence)
                finished.append(sequence)
        if not (todo or planner.running or planner.waiting):
            break
    assert set(map(id, finished)) == set(map(id, wanted))
    assert all(s.made == s.limit for s in finished)
    assert planner.blocks.used == 0


def test_the_youngest_gives_way_and_is_the_next_to_come_back() -> None:
    planner = Planner(Blocks(4, 1), most=4, chunk=8)
    old, young = Sequence([1], 1, 9), Sequence([2], 1, 9)
    planner.add(old)
    planner.add(young)
    for _ in range(2):
        plan = planner.plan()
        planner.done(plan)
        for sequence in plan.sampled:
            sequence.push(0)
    assert planner.blocks.free == 0
    plan = planner.plan()
    assert plan.sequences == (old,)
    assert (planner.preemptions, list(planner.waiting)) == (1, [young])
    assert (young.computed, young.blocks, len(young.tokens)) == (0, [], 3), "its tokens stay"
