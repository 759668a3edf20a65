"""What a server tells and what is made of it: any JSON as an answer, sizes of prompts, load reports."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.engine import FinishReason, GenerateRequest, Message
from services.faults import EngineFault
from services.upstream import orca
from services.upstream.answer import Answer
from services.upstream.request import wire
from services.upstream.size import Ruler
from services.upstream.verdict import verdict

WORDS = ["choices", "delta", "content", "text", "finish_reason", "token_ids", "usage", "error", "code"]
JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.integers() | st.text(max_size=5) | st.sampled_from(["length", "abort", "[DONE]"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=4),
    max_leaves=12,
)
TEXT = GenerateRequest("r", "x" * 40_000, 1)
VLLM_S = {"kv_cache_usage_perc": 0.4, "num_requests_waiting": 3.0}


@given(st.lists(JSON, max_size=3))
def test_whatever_a_server_says_is_tokens_or_a_fault(events: list[Any]) -> None:
    answer = Answer("e", 2)
    with contextlib.suppress(EngineFault):
        for said in events:
            made = answer.event(json.dumps({"choices": [said]})) + answer.event(json.dumps(said))
            assert all(isinstance(token.text, str) for token in made)
        assert isinstance(answer.end().finish, FinishReason)


def test_json_too_deep_to_read_is_a_fault() -> None:
    with pytest.raises(EngineFault, match="no answer"):
        Answer("e", 9).event("[" * 100_000)
    assert str(verdict(500, {}, "[" * 100_000))


def test_a_length_that_was_not_named_is_not_named_to_the_server() -> None:
    asked = GenerateRequest("r", "flat", 256, messages=(Message("user", "hi"),), open_ended=True)
    assert "max_tokens" not in wire(asked, "m", token_ids=False)[1]
    assert wire(replace(asked, open_ended=False), "m", token_ids=False)[1]["max_tokens"] == 256
    assert wire(replace(asked, messages=()), "m", token_ids=False)[1]["max_tokens"] == 256, "else it gets 16"


def test_of_an_answer_without_a_length_no_token_is_held_back() -> None:
    answer = Answer("e", 0)
    for text in "abc":
        said = json.dumps({"choices": [{"index": 0, "text": text, "finish_reason": None}]})
        assert [token.text for token in answer.event(said)] == [text]


# -- sizes


def test_ids_are_counted_and_a_text_is_guessed_from_its_bytes() -> None:
    ruler = Ruler()
    assert ruler.size(replace(TEXT, prompt="", prompt_ids=(5, 6, 7))) == 3
    assert ruler.size(TEXT) == 10_000
    assert ruler.size(replace(TEXT, prompt="")) == 1
    assert ruler.size(replace(TEXT, prompt="流" * 4000)) == 3000, "bytes, not characters"


def test_the_guess_follows_what_the_server_counts() -> None:
    ruler = Ruler()
    for _ in range(5):
        ruler.learn(replace(TEXT, prompt="hi"), 40)
        ruler.learn(TEXT, 0)
        ruler.learn(replace(TEXT, prompt_ids=(1,) * 999), 999)
    assert ruler.size(TEXT) == 10_000, "a chat template, silence and ids teach nothing"
    ruler.learn(TEXT, 20_000)
    assert ruler.size(TEXT) == pytest.approx(20_000, rel=0.02)
    for _ in range(120):
        ruler.learn(TEXT, 8000)
    assert ruler.size(TEXT) == pytest.approx(8000, rel=0.02), "what was long ago weighs little"


# -- load reports


@pytest.mark.parametrize(
    ("report", "found"),
    [
        ("", {}),
        ("TEXT named_metrics.kv_cache_usage_perc=0.4, named_metrics.num_requests_waiting=3.0", VLLM_S),
        ('JSON {"named_metrics": {"kv_cache_usage_perc": 0.4, "num_requests_waiting": 3}}', VLLM_S),
        ("TEXT cpu_utilization=0.5,named_metrics.a=1,named_metrics.b=x,named_metrics.=2", {"a": 1}),
        ("TEXT named_metrics.a=inf, named_metrics.a b=1, named_metrics.c", {}),
        ('JSON {"named_metrics": {"a": true, "b": null, "c,d": 1, "e": 1e999, "f": [1]}}', {}),
        ("JSON [1]", {}),
        ("JSON {", {}),
        ("JSON " + "[" * 100_000, {}),
        ("named_metrics.a=1", {}),
    ],
)
def test_named_metrics_of_a_report_are_read_and_nothing_else(report: str, found: dict[str, float]) -> None:
    """The first two that say something are vLLM 0.32's two forms."""
    assert orca.named({orca.HEADER: report}) == found


def test_a_report_of_too_many_names_is_cut() -> None:
    many = ", ".join(f"named_metrics.m{i}=1" for i in range(100))
    assert len(orca.named({orca.HEADER: f"TEXT {many}"})) == orca.MOST
