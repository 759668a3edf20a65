"""Tracked accounting: whatever happens in whatever order, nothing is lost and nothing is given twice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.kv.shape import KvShape, blocks_for
from tests.kv_ledger import Fits, KvLedger, Later, LedgerError, Never, admit

steps = st.lists(
    st.tuples(
        st.sampled_from(("reserve", "commit", "free", "admit")), st.sampled_from("abcd"), st.integers(0, 120)
    ),
    max_size=60,
)


@given(steps=steps, capacity=st.integers(0, 20), block=st.integers(1, 17), window=st.sampled_from((0, 1, 33)))
def test_never_negative_never_over_and_zero_at_the_end(
    steps: list[tuple[str, str, int]], capacity: int, block: int, window: int
) -> None:
    ledger = KvLedger(capacity, block, window)
    model: dict[str, tuple[int, int]] = {}  # request → (blocks, tokens written)
    for verb, name, tokens in steps:
        have, written = model.get(name, (0, 0))
        try:
            if verb == "reserve":
                want = max(have, blocks_for(tokens, block, window))
                assert ledger.reserve(name, tokens) == want
                model[name] = (want, written)
            elif verb == "commit":
                ledger.commit(name, tokens)
                model[name] = (have, written + tokens)
            elif verb == "free":
                assert ledger.free(name) == have
                del model[name]
            else:
                verdict = admit(tokens, ledger)
                assert isinstance(verdict, Fits) == (blocks_for(tokens, block, window) <= ledger.free_blocks)
        except LedgerError:
            pass  # refused: the model wasn't changed, so the checks below hold the ledger to that
        assert ledger.used == sum(blocks for blocks, _ in model.values())
        assert ledger.written == sum(tokens for _, tokens in model.values())
        assert 0 <= ledger.used <= ledger.capacity
        assert 0.0 <= ledger.use <= 1.0
        assert all(ledger.reserved(n) == model.get(n, (0, 0))[0] for n in "abcd")
    for name in list(model):
        ledger.free(name)
    assert (ledger.used, ledger.written, ledger.requests, ledger.free_blocks) == (0, 0, 0, capacity)


@given(capacity=st.integers(1, 50), wants=st.lists(st.integers(1, 900), max_size=30))
def test_what_fits_can_be_reserved_and_what_waits_fits_once_all_left(capacity: int, wants: list[int]) -> None:
    ledger = KvLedger(capacity)
    waiting = []
    for number, tokens in enumerate(wants):
        verdict = admit(tokens, ledger)
        if isinstance(verdict, Fits):
            assert ledger.reserve(str(number), tokens) == verdict.blocks
        elif isinstance(verdict, Later):
            assert verdict.missing == verdict.blocks - ledger.free_blocks > 0
            waiting.append(tokens)
        else:
            assert verdict.blocks > capacity
    for number in range(len(wants)):
        if ledger.reserved(str(number)):
            ledger.free(str(number))
    assert all(isinstance(admit(tokens, ledger), Fits) for tokens in waiting)


def test_a_double_free_shows() -> None:
    ledger = KvLedger(4)
    ledger.reserve("a", 20)
    assert ledger.free("a") == 2
    with pytest.raises(LedgerError, match="a: holds nothing"):
        ledger.free("a")


def test_writing_beyond_what_was_promised_shows() -> None:
    ledger = KvLedger(4)
    ledger.reserve("a", 20)
    ledger.commit("a", 32)
    with pytest.raises(LedgerError, match="32 \\+ 1 tokens don't go into 2 blocks"):
        ledger.commit("a")


def test_a_reservation_that_doesnt_fit_books_nothing() -> None:
    ledger = KvLedger(4)
    ledger.reserve("a", 33)
    with pytest.raises(LedgerError, match="2 blocks wanted, 1 free"):
        ledger.reserve("b", 32)
    assert (ledger.used, ledger.reserved("b"), ledger.requests) == (3, 0, 1)


def test_admission_says_why_never() -> None:
    ledger = KvLedger(10)
    assert admit(160, ledger) == Fits(10)
    verdict = admit(161, ledger)
    assert isinstance(verdict, Never)
    assert "11 blocks" in verdict.reason
    verdict = admit(100, ledger, context=99)
    assert isinstance(verdict, Never)
    assert "context of 99" in verdict.reason
    ledger.reserve("a", 16 * 4)
    assert admit(160, ledger) == Later(10, 4)


def test_a_window_lets_any_length_in() -> None:
    ledger = KvLedger(4, window=32)
    assert admit(1_000_000, ledger) == Fits(3)


def test_a_ledger_of_a_shape_has_the_blocks_that_its_memory_gives() -> None:
    shape = KvShape(layers=2, kv_heads=2, head_dim=64).with_window(100)
    ledger = KvLedger.of_shape(shape, 10 * shape.bytes_per_block + 1)
    assert (ledger.capacity, ledger.block, ledger.window) == (10, 16, 100)
