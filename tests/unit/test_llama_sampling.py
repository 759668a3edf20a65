"""From logits to tokens: a row's token depends on the row alone, and follows its probabilities."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.llama.sampling import NUCLEUS, choose, dice
from services.llama.sequence import Sampling

pytestmark = pytest.mark.torch

SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 1e-30, 0.3, 1.0, 5.0]),
    top_p=st.sampled_from([1e-9, 0.3, 0.95, 0.999999, 1.0]),
    seed=st.integers(0, 2**40),
    sample=st.integers(0, 3),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(SAMPLINGS, min_size=1, max_size=6), st.integers(0, 9), st.sampled_from([3, NUCLEUS * 3]))
def test_who_else_is_in_the_batch_changes_nothing(how: list[Sampling], index: int, words: int) -> None:
    logits = torch.randn(len(how), words, generator=torch.Generator().manual_seed(index)) * 0.5
    together, good = choose(logits, how, [index] * len(how))
    alone = [choose(logits[i : i + 1], [one], [index])[0][0] for i, one in enumerate(how)]
    assert together == alone
    assert all(good)
    assert all(0 <= token < words for token in together)
    for token, row, one in zip(together, logits, how, strict=True):
        if one.temperature < 1e-9 or one.top_p < 1e-6:
            assert token == row.argmax()


def test_frequencies_are_the_probabilities() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, float("-1e9")]])
    count = 4000
    found, _ = choose(logits.expand(count, 4), [Sampling(1.0, seed=i) for i in range(count)], [0] * count)
    shares = torch.bincount(torch.tensor(found), minlength=4) / count
    assert torch.allclose(shares, torch.softmax(logits[0], 0), atol=0.03)
    assert shares[3] == 0


def test_top_p_keeps_the_likeliest_alone() -> None:
    logits = torch.log(torch.tensor([[0.1, 0.5, 0.3, 0.1]]))
    count = 500
    how = [Sampling(1.0, 0.6, seed=i) for i in range(count)]
    found, _ = choose(logits.expand(count, 4), how, [0] * count)
    assert set(found) == {1, 2}


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_is_told(bad: float, temperature: float) -> None:
    logits = torch.zeros(3, 8)
    logits[1, 4] = bad
    tokens, good = choose(logits, [Sampling(temperature, 0.9)] * 3, [0] * 3)
    assert good == [True, False, True]
    assert all(0 <= token < 8 for token in tokens)


def test_large_half_precision_logits_are_finite() -> None:
    logits = torch.full((1, 64), 60_000.0, dtype=torch.float16)
    assert choose(logits, [Sampling()], [0])[1] == [True]


def test_dice_differ_by_each_part() -> None:
    throws = {
        dice(Sampling(seed=a, sample=b), index) for a in range(5) for b in range(5) for index in range(5)
    }
    assert len(throws) == 125
    assert all(0 <= throw < 1 for throw in throws)
