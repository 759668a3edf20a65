"""The client of OpenAI-compatible servers, its pure parts: events, answers, requests, errors, options."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regions.cli.errors import UsageError
from services.engine import FinishReason, GenerateRequest, Message, Token
from services.faults import EngineFault, Refused
from services.upstream import sse
from services.upstream.answer import DONE, Answer
from services.upstream.options import read
from services.upstream.request import CHAT, COMPLETIONS, wire
from services.upstream.sse import BadStream, Events
from services.upstream.verdict import verdict

TEXT = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=12)
ENDS = st.sampled_from(["\n", "\r", "\r\n"])


# -- events


@given(st.lists(st.lists(TEXT, min_size=1, max_size=3), max_size=4), ENDS, st.data())
def test_events_are_the_same_wherever_the_pieces_end(
    events: list[list[str]], end: str, data: st.DataObject
) -> None:
    wire_text = "".join(
        "".join(f"data: {line}{end}" for line in event) + f": a comment{end}id: 7{end}{end}"
        for event in events
    )
    raw = wire_text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=6)))
    reader, found = Events(), []
    for start, stop in zip([0, *cuts], [*cuts, len(raw)], strict=True):
        found += reader.feed(raw[start:stop])
    assert found == ["\n".join(event) for event in events]


def test_every_byte_alone_gives_the_same() -> None:
    raw = "\ufeffdata: é\r\ndata:ü\n\rdata: 🌊\r\r\n".encode()
    reader = Events()
    assert [one for byte in raw for one in reader.feed(bytes([byte]))] == ["é\nü", "🌊"]


def test_what_does_not_end_is_not_told() -> None:
    assert Events().feed(b"data: whole\n\ndata: half") == ["whole"]


def test_a_name_without_colon_and_other_fields_are_skipped() -> None:
    assert Events().feed(b"data\nevent: x\nretry: 5\n\nevent: y\n\n") == [""]


def test_no_utf8_is_no_stream() -> None:
    with pytest.raises(BadStream, match="UTF-8"):
        Events().feed(b"data: \xff\n\n")


def test_an_event_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_EVENT", 100)
    for piece in (b"data: " + b"x" * 200, b"data: xxxxxxxxxx\n" * 20):
        with pytest.raises(BadStream, match="more than 100"):
            Events().feed(piece)


# -- answers


def chunk(text: str = "", finish: str | None = None, **more: Any) -> str:
    return json.dumps({"choices": [{"index": 0, "text": text, "finish_reason": finish, **more}]})


def delta(text: str = "", finish: str | None = None, **more: Any) -> str:
    return json.dumps(
        {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish, **more}]}
    )


USAGE = json.dumps({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}})


def run(events: list[str], most: int = 10) -> list[Token]:
    answer = Answer("e", most)
    out = [token for event in events for token in answer.event(event)]
    return [*out, answer.end()]


@pytest.mark.parametrize("make", [chunk, delta])
def test_a_finish_with_the_last_token(make: Any) -> None:
    """As vLLM and trtllm-serve say it."""
    tokens = run([make("a", token_ids=[7]), make("b", "length", token_ids=[8]), USAGE, DONE])
    assert tokens == [Token(7, "a", None, 0, "e"), Token(8, "b", FinishReason.LENGTH, 5, "e")]


def test_a_finish_apart_from_the_last_token_counts_no_token_more() -> None:
    """As OpenAI and llama-server say it; at max_tokens the last piece is held until the end is known."""
    answer = Answer("e", 2)
    assert answer.event(chunk("a")) == [Token(-1, "a", None, 0, "e")]
    assert answer.event(chunk("b")) == []
    assert answer.event(chunk("", "length")) == []
    assert answer.end() == Token(-1, "b", FinishReason.LENGTH, 0, "e")


def test_the_end_token_is_a_token_without_text() -> None:
    tokens = run([chunk("a"), chunk("", "stop"), DONE])
    assert [(t.text, t.finish) for t in tokens] == [("a", None), ("", FinishReason.STOP)]


def test_the_prompt_is_counted_by_its_ids_on_the_first_token() -> None:
    role = json.dumps(
        {
            "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}],
            "prompt_token_ids": [1, 2, 3],
        }
    )
    assert [
        t.prompt_tokens for t in run([role, delta("a", token_ids=[9]), delta("b", "stop", token_ids=[8])])
    ] == [3, 3]
    assert run([chunk("a", "stop", token_ids=[9], prompt_token_ids=[1, 2])])[0].prompt_tokens == 2


def test_several_tokens_in_one_event_are_several_tokens() -> None:
    tokens = run(
        [chunk("abc", token_ids=[1, 2, 3]), chunk("", None, token_ids=[4]), chunk("d", "stop", token_ids=[5])]
    )
    assert [(t.token_id, t.text) for t in tokens] == [(1, ""), (2, ""), (3, "abc"), (4, ""), (5, "d")]
    assert [t.finish for t in tokens] == [None] * 4 + [FinishReason.STOP]


@given(st.lists(st.integers(1, 3), min_size=1, max_size=6), st.booleans())
def test_however_it_is_cut_the_tokens_are_all_there(sizes: list[int], apart: bool) -> None:
    total, at, events = sum(sizes), 0, []
    for number, size in enumerate(sizes):
        last = number == len(sizes) - 1 and not apart
        ids = list(range(at, at + size))
        events.append(chunk("".join(map(str, ids)), "length" if last else None, token_ids=ids))
        at += size
    tokens = run([*events, *([chunk("", "length")] if apart else []), DONE], total)
    assert [t.token_id for t in tokens] == list(range(total))
    assert "".join(t.text for t in tokens) == "".join(map(str, range(total)))
    assert [t.finish for t in tokens] == [None] * (total - 1) + [FinishReason.LENGTH]


@pytest.mark.parametrize("events", [[], [chunk("a")], [chunk("a"), DONE], [USAGE, DONE]])
def test_an_answer_without_an_end_broke_off(events: list[str]) -> None:
    with pytest.raises(EngineFault, match="broke off"):
        run(events)


@pytest.mark.parametrize(
    ("event", "says"),
    [
        ("{", "no answer"),
        ("[]", "no answer"),
        ("{}", "no answer"),
        ('{"choices": 3}', "no answer"),
        ('{"error": {"message": "out of cheese"}}', "out of cheese"),
        ('{"error": "all gone"}', "all gone"),
        (chunk("x", "abort"), "gave the sequence up"),
    ],
)
def test_what_is_no_answer_is_a_fault(event: str, says: str) -> None:
    with pytest.raises(EngineFault, match=says):
        Answer("e", 9).event(event)


def test_a_refusal_in_the_stream_is_a_refusal() -> None:
    said = json.dumps({"error": {"message": "too long", "code": 400, "param": "prompt"}})
    with pytest.raises(Refused) as caught:
        Answer("e", 9).event(said)
    assert (caught.value.status, caught.value.param) == (400, "prompt")


# -- requests


def test_a_prompt_goes_to_completions_as_text_or_as_ids() -> None:
    path, body = wire(GenerateRequest("r", "hello", 5, seed=3), "m", token_ids=False)
    assert (path, body["prompt"], body["max_tokens"], body["seed"]) == (COMPLETIONS, "hello", 5, 3)
    assert body["stream"] is True
    assert body["stream_options"] == {"include_usage": True}
    assert not {"ignore_eos", "return_token_ids", "stop"} & set(body)
    assert wire(GenerateRequest("r", "", 5, prompt_ids=(4, 5)), "m", token_ids=False)[1]["prompt"] == [4, 5]


def test_a_chat_goes_as_messages_and_extensions_only_when_asked() -> None:
    turns = (Message("system", "be brief"), Message("user", "hi"))
    asked = GenerateRequest("r", "flat", 5, messages=turns, stop=("x",), ignore_eos=True, top_p=0.5, sample=2)
    path, body = wire(asked, "m", token_ids=True)
    assert path == CHAT
    assert "prompt" not in body
    assert [m["role"] for m in body["messages"]] == ["system", "user"]
    assert (body["ignore_eos"], body["return_token_ids"], body["stop"]) == (True, True, ["x"])
    assert (body["top_p"], body["seed"]) == (0.5, 2)


# -- errors


def test_the_client_s_own_mistake_is_refused_with_its_field() -> None:
    """The text of vLLM 0.32."""
    said = {"message": "1 validation error", "type": "Bad Request", "param": "body.n", "code": 400}
    fault = verdict(400, {}, json.dumps({"error": said}))
    assert isinstance(fault, Refused)
    assert (fault.status, fault.param, fault.code) == (400, "n", "invalid_request")


@pytest.mark.parametrize(
    "message",
    [
        "max_tokens=99999 cannot be greater than max_model_len=2048. Please request fewer output tokens.",
        "This model's maximum context length is 2048 tokens.",
        "the request exceeds the available context size, try increasing it",
    ],
)
def test_too_long_has_openai_s_code(message: str) -> None:
    fault = verdict(400, {}, json.dumps({"error": {"message": message, "code": 400}}))
    assert fault.code == "context_length_exceeded"


def test_not_now_says_when() -> None:
    body = json.dumps({"error": {"message": "slow down", "code": "queue_full"}})
    fault = verdict(429, {"Retry-After": "2.5"}, body)
    assert isinstance(fault, Refused)
    assert (fault.status, fault.code, fault.retry_after_s) == (429, "queue_full", 2.5)
    for header in ("", "Wed, 21 Oct 2026 07:28:00 GMT", "-1", "nan", "1e9"):
        later = verdict(429, {"Retry-After": header}, "")
        assert isinstance(later, Refused)
        assert later.retry_after_s == 1.0


@pytest.mark.parametrize("status", [401, 403, 404, 500, 502, 503])
def test_everything_else_is_the_server_s(status: int) -> None:
    fault = verdict(status, {}, '{"error": {"message": "because"}}')
    assert not isinstance(fault, Refused)
    assert str(status) in str(fault)
    assert "because" in str(fault)


@given(st.integers(300, 599), st.text(max_size=40))
def test_any_body_at_all_is_understood(status: int, body: str) -> None:
    assert str(verdict(status, {}, body))


@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["error", "message", "code", "param"]), inner, max_size=4)
        ),
        max_leaves=8,
    )
)
def test_any_json_at_all_is_understood(body: Any) -> None:
    assert str(verdict(400, {}, json.dumps(body)))


# -- options


@dataclass(frozen=True, slots=True)
class Sample:
    name: str = ""
    number: int = 1
    share: float = 0.5
    flag: bool = False


def test_options_are_read_by_their_kind() -> None:
    given = {"name": "x", "number": "7", "share": "0.25", "flag": "on"}
    assert read(Sample, "e", given, {}) == Sample("x", 7, 0.25, True)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"nam": "x"}, "unknown to e"),
        ({"number": "1.5"}, "not a number"),
        ({"number": "-1"}, "out of range"),
        ({"share": "nan"}, "out of range"),
        ({"flag": "maybe"}, "neither on nor off"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        read(Sample, "e", options, {})
