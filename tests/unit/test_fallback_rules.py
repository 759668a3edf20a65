"""The decision, without engines: which rule holds, in which order, and that it doesn't flap."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regions.yamlfile import DataFileError
from services.fallback.rules import (
    DEFAULT_RULES,
    STAY,
    Choice,
    Facts,
    Reason,
    Rule,
    Which,
    decide,
    fragmented,
)
from services.fallback.rules_file import load_rules

QUIET = Facts(sequence_tokens=100, context=131072, fragmentation=0.1, running=4)


def second(reason: str) -> Choice:
    return Choice(Which.SECONDARY, reason)


@pytest.mark.parametrize(
    ("facts", "choice"),
    [
        (QUIET, STAY),
        (replace(QUIET, sequence_tokens=8192), STAY),
        (replace(QUIET, sequence_tokens=8193), second("sequence_length")),
        (replace(QUIET, sequence_tokens=4097, context=4096), second("sequence_length")),
        (replace(QUIET, sequence_tokens=4097, context=0), STAY),
        (replace(QUIET, fragmentation=0.65), STAY),
        (replace(QUIET, fragmentation=0.651), second("fragmentation")),
        (replace(QUIET, fragmentation=0.6, fragmented=True), second("fragmentation")),
        (replace(QUIET, fragmentation=0.55, fragmented=True), STAY),
        (replace(QUIET, fragmentation=0.99, running=0), STAY),
        (replace(QUIET, fragmentation=float("nan")), STAY),
        (replace(QUIET, error="bad_logits"), second("engine_error")),
        (replace(QUIET, refused="queue_full"), second("queue_full")),
        (replace(QUIET, refused="kv_full"), second("queue_full")),
        (replace(QUIET, refused="kv_never_fits"), second("sequence_length")),
        (replace(QUIET, refused="context_length_exceeded"), second("sequence_length")),
        (replace(QUIET, refused="rate_limited"), STAY),
        (replace(QUIET, sequence_tokens=9000, error="engine_dead"), second("sequence_length")),
        (replace(QUIET, sequence_tokens=9000, error="engine_dead", secondary_dead=True), STAY),
    ],
)
def test_decisions(facts: Facts, choice: Choice) -> None:
    assert decide(DEFAULT_RULES, facts) == choice


def test_the_first_rule_that_holds_names_the_reason() -> None:
    facts = replace(QUIET, sequence_tokens=9000, fragmentation=0.9)
    assert decide(DEFAULT_RULES[::-1], facts) == second("fragmentation")
    assert decide((), facts) == STAY


@given(st.lists(st.floats(0.56, 0.64), max_size=50), st.booleans())
def test_between_the_two_limits_nothing_changes(figures: list[float], before: bool) -> None:
    """The whole point of two limits: noise between them doesn't send traffic to and fro."""
    state = before
    for figure in figures:
        state = fragmented(DEFAULT_RULES, replace(QUIET, fragmentation=figure, fragmented=state))
        assert state == before


@given(st.lists(st.floats(0, 1), max_size=80))
def test_a_change_needs_the_whole_way_between_the_limits(figures: list[float]) -> None:
    state, last_change = False, 0.0
    for figure in figures:
        after = fragmented(DEFAULT_RULES, replace(QUIET, fragmentation=figure, fragmented=state))
        if after != state:
            assert abs(figure - last_change) >= 0.1 - 1e-9 or last_change == 0.0
            assert figure > 0.65 if after else figure <= 0.55
            last_change = figure
        state = after


@pytest.mark.parametrize(
    "wrong",
    [
        {"when": Reason.SEQUENCE_LENGTH, "over": 0},
        {"when": Reason.FRAGMENTATION, "over": 0.5, "until": 0.6},
        {"when": Reason.FRAGMENTATION, "over": 1.5},
        {"when": Reason.QUEUE_FULL},
        {"when": Reason.ENGINE_ERROR, "over": 3},
        {"when": Reason.SEQUENCE_LENGTH, "over": 10, "until": 5},
    ],
)
def test_a_rule_that_means_nothing_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=str(wrong["when"])):
        Rule(**wrong)  # type: ignore[arg-type]


def test_the_shipped_file_says_what_the_default_says() -> None:
    assert load_rules() == DEFAULT_RULES


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("rules:\n  - when: sequence_lenght\n", 2, "when"),
        ("rules:\n  - when: sequence_length\n    over: many\n", 3, "over"),
        ("rules:\n  - when: sequence_length\n", 2, "number of tokens"),
        ("rules:\n  - when: engine_error\n  - when: engine_error\n", 3, "twice"),
        ("rules:\n  - when: engine_error\n    sure: true\n", 3, "sure"),
        ("rules:\n  - when: fragmentation\n    over: 0.5\n    until: 0.9\n", 2, "until <= over"),
        ("rule: []\n", 1, "rule"),
    ],
)
def test_a_wrong_file_is_refused_with_its_line(tmp_path: Path, text: str, line: int, words: str) -> None:
    file = tmp_path / "rules.yaml"
    file.write_text(text)
    with pytest.raises(DataFileError) as caught:
        load_rules(file)
    assert words in str(caught.value)
    assert line in [problem.line for problem in caught.value.problems]


def test_no_rules_is_a_choice_too(tmp_path: Path) -> None:
    file = tmp_path / "rules.yaml"
    file.write_text("rules: []\n")
    assert load_rules(file) == ()
