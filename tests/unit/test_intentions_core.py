"""Intentions: the catalog file, who wins, plans, and what Consul is sent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from intentions.load import load_intentions
from intentions.model import WILDCARD, Action, Intention
from intentions.plan import PlanError, apply, pair, plan
from intentions.precedence import decide, for_destination, matches, precedence
from intentions.render import (
    L7,
    config_entries,
    enforceable,
    entry_intentions,
    legacy_body,
    merged_entry,
    read_rows,
)
from regions.yamlfile import DataFileError

SHIPPED = Path(__file__).parents[2] / "intentions" / "catalog.yaml"
NAMES = ("a", "b", "chat")
ALLOW, DENY = Action.ALLOW, Action.DENY

party = st.sampled_from((*NAMES, WILDCARD))
intention = st.builds(Intention, party, party, st.sampled_from(Action), st.sampled_from(("", "why")))
one_per_pair = st.lists(intention, unique_by=pair, max_size=16)


def test_the_shipped_catalog_lets_the_ingress_in_and_nobody_else() -> None:
    rows = load_intentions(SHIPPED)
    assert decide(rows, "ingress-gateway", "chat").allowed
    assert not decide(rows, "chat", "ingress-gateway").allowed
    assert not decide(rows, "web", "chat").allowed


@pytest.mark.parametrize(
    ("text", "line", "field", "words"),
    [
        ("intentions:\n  - {source: a, destination: b}\n", 2, "intentions[0].action", "missing"),
        ("intentions:\n  - {source: a, destination: b, action: maybe}\n", 2, "intentions[0].action", "allow"),
        (
            'intentions:\n  - {source: "a*", destination: b, action: deny}\n',
            2,
            "intentions[0].source",
            "its own",
        ),
        (
            "intentions:\n  - source: a\n    destination: B\n    action: deny\n",
            3,
            "intentions[0].destination",
            "name",
        ),
        (
            "intentions:\n  - {source: a, destination: b, action: deny, port: 3}\n",
            2,
            "intentions[0].port",
            "unknown",
        ),
        (
            "intentions:\n  - {source: a, destination: b, action: deny}\n"
            "  - {source: b, destination: a, action: deny}\n  - {source: a, destination: b, action: allow}\n",
            4,
            "intentions[2]",
            "on line 2",
        ),
        ("rules: []\n", 1, "intentions", "missing"),
    ],
)
def test_a_wrong_row_is_named(tmp_path: Path, text: str, line: int, field: str, words: str) -> None:
    (tmp_path / "catalog.yaml").write_text(text)
    with pytest.raises(DataFileError) as caught:
        load_intentions(tmp_path / "catalog.yaml")
    told = {p.field: p for p in caught.value.problems}
    assert told[field].line == line
    assert words in told[field].reason


def test_no_rows_is_a_valid_catalog(tmp_path: Path) -> None:
    (tmp_path / "catalog.yaml").write_text("intentions: []\n")
    assert load_intentions(tmp_path / "catalog.yaml") == ()


@given(rules=one_per_pair, source=st.sampled_from(NAMES), destination=st.sampled_from(NAMES))
def test_the_most_exact_rule_decides_and_nothing_is_denied(
    rules: list[Intention], source: str, destination: str
) -> None:
    by_pair = {pair(r): r for r in rules}
    # Consul's documented order, written out: destination before source.
    order = [(destination, source), (destination, "*"), ("*", source), ("*", "*")]
    expected = next((by_pair[p] for p in order if p in by_pair), None)
    decision = decide(rules, source, destination)
    assert decision.rule == expected
    assert decision.action is (expected.action if expected else DENY)
    assert decision.reason


@given(rules=st.lists(intention, max_size=12), data=st.data())
def test_the_order_of_the_rows_means_nothing(rules: list[Intention], data: st.DataObject) -> None:
    shuffled = data.draw(st.permutations(rules))
    for source in NAMES:
        assert decide(rules, source, "chat") == decide(shuffled, source, "chat")


@given(rules=st.lists(intention, max_size=12))
def test_first_match_in_deciding_order_is_the_decision(rules: list[Intention]) -> None:
    ordered = for_destination(rules, "chat")
    assert [precedence(r) for r in ordered] == sorted((precedence(r) for r in ordered), reverse=True)
    for source in NAMES:
        first = next((r for r in ordered if matches(r, source, "chat")), None)
        assert decide(rules, source, "chat").rule == first


def test_of_two_rules_for_one_pair_deny_wins() -> None:
    both = [Intention("chat", "a", ALLOW), Intention("chat", "a", DENY)]
    assert not decide(both, "a", "chat").allowed


@given(have=one_per_pair, want=one_per_pair)
def test_a_plan_turns_have_into_want_once(have: list[Intention], want: list[Intention]) -> None:
    todo = plan(have, want)
    assert set(apply(have, todo)) == set(want)
    again = plan(apply(have, todo), want)
    assert (again.changes, again.lines(), len(again.unchanged)) == (0, (), len(want))
    assert len(todo.lines()) == todo.changes
    # Nothing is touched that is right already.
    assert {pair(p.new) for p in todo.puts} & {pair(i) for i in todo.unchanged} == set()


def test_a_plan_reads_as_a_diff() -> None:
    have = [Intention("chat", "a", DENY), Intention("chat", "b", ALLOW), Intention("x", "a", ALLOW, "old")]
    want = [Intention("chat", "a", ALLOW), Intention("x", "a", ALLOW, "new"), Intention("y", "*", DENY)]
    todo = plan(have, want)
    assert todo.lines() == (
        "~ a -> chat: deny => allow (opens access)",
        "- b -> chat: allow",
        "~ a -> x: description 'old' => 'new'",
        "+ * -> y: deny",
    )
    assert todo.summary() == "1 to add, 2 to change, 1 to delete, 0 unchanged"


def test_a_plan_refuses_two_rows_for_one_pair() -> None:
    twice = [Intention("chat", "a", ALLOW), Intention("chat", "a", DENY)]
    with pytest.raises(PlanError, match="want: two intentions for a -> chat"):
        plan([], twice)


ROWS = (
    Intention("chat", "ingress-gateway", ALLOW, "clients"),
    Intention("chat", WILDCARD, DENY),
    Intention("chat", "batch", ALLOW),
    Intention(WILDCARD, WILDCARD, DENY, "default"),
)


def test_what_consul_is_sent(golden_json: Callable[[str, Any], None]) -> None:
    golden_json("intentions/config-entries.json", config_entries(ROWS))
    golden_json("intentions/legacy-bodies.json", [legacy_body(i) for i in sorted(ROWS)])


@given(rules=one_per_pair)
def test_config_entries_lose_nothing(rules: list[Intention]) -> None:
    entries = config_entries(rules)
    assert {i for e in entries for i in entry_intentions(e)} == set(rules)
    assert all(e["Sources"] for e in entries)


def test_a_rewritten_entry_keeps_what_is_not_ours(golden_json: Callable[[str, Any], None]) -> None:
    current = {
        "Kind": "service-intentions",
        "Name": "chat",
        "Meta": {"team": "x"},
        "ModifyIndex": 9,
        "Hash": 5,
        "Sources": [
            {"Name": "old", "Action": "allow", "Precedence": 9, "LegacyID": "1", "LegacyMeta": {}},
            {"Name": "api", "Type": "consul", "Precedence": 9, "Permissions": [{"Action": "allow"}]},
            {"Name": "old", "Action": "allow", "Type": "consul", "Peer": "other", "Precedence": 9},
        ],
    }
    golden_json("intentions/merged-entry.json", merged_entry(current, "chat", ROWS[:2]))
    assert merged_entry({**current, "Sources": current["Sources"][:1]}, "chat", ()) is None  # type: ignore[index]
    assert merged_entry(None, "chat", ()) is None


def test_l7_rules_never_open_more_than_they_say() -> None:
    """An L7 rule that was skipped would leave the call to a wider allow below it."""
    rows = [
        {"SourceName": "*", "DestinationName": "chat", "Action": "allow"},
        {"SourceName": "a", "DestinationName": "chat", "Permissions": [{"Action": "deny"}]},
        {"SourceName": "b", "DestinationName": "chat", "Action": "deny", "SourcePeer": "other"},
    ]
    ours, foreign = read_rows(rows)
    assert ours == (Intention("chat", "*", ALLOW),)
    assert [(f.source, f.why == L7) for f in foreign] == [("a", True), ("b", False)]
    enforced = enforceable(ours, foreign)
    assert not decide(enforced, "a", "chat").allowed
    assert decide(enforced, "b", "chat").allowed
