"""What a request may say, and how text is cut at stop strings."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.engine import Message
from services.openai_api import MAX_TOKENS, ApiError, Prompt, parse
from services.stops import Cutter

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT: dict[str, Any] = {"model": "m", "prompt": "hi"}


def refused(body: Any, *, chat: bool = True) -> ApiError:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(ApiError) as caught:
        parse(raw, chat=chat, model="m")
    return caught.value


NO_OBJECT = (b"", b"{", b"\xff\xfe", b"[" * 100_000, b"[]", b'"x"', b"null", b"9" * 9999)
NO_JSON = (b'{"temperature": NaN}', b'{"user": -Infinity}', b'{"prompt": ' + b'{"a":' * 50_000)


@pytest.mark.parametrize("raw", NO_OBJECT + NO_JSON)
def test_a_body_that_is_no_json_object(raw: bytes) -> None:
    assert refused(raw).status == 400


def _user(content: Any, role: Any = "user") -> list[Any]:
    return [{"role": role, "content": content}]


BAD: dict[str, list[Any]] = {
    "max_tokens": [0, -1, MAX_TOKENS + 1, 10**30, 1.5, "7", True, []],
    "n": [0, 17, 1000, -1, "1", True],
    "seed": ["x", 1.5, True, 2**63, -(2**63) - 1],
    "stream": ["true", 1, []],
    "stop": [7, "", [""], ["a", 1], ["a", "b", "c", "d", "e"], {}, "x" * 1025],
    "temperature": [-0.1, 2.1, "1", True],
    "top_p": [0, -0.1, 1.1, "1", True],
    "ignore_eos": [1, "yes"],
    "return_token_ids": [1, "yes"],
    "stream_options": [True, "x", []],
    "messages": [None, [], {}, "hi", [1], [{}], [{"role": "user"}], _user("hi", None), _user("hi", 7)],
    "messages[0]": [None, 7, [], [{}], ["a"], {}],
    "model": [7],
    "best_of": [3],
    "logprobs": [True, 0, 5],
    "presence_penalty": [0.5, -1, "x"],
    "logit_bias": [{"50256": -100}],
    "tools": [[{"type": "function"}]],
    "response_format": [{"type": "json_object"}],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field in BAD for value in BAD[field]])
def test_a_bad_field_is_named(field: str, value: Any) -> None:
    error = refused(CHAT | ({"messages": _user(value)} if field == "messages[0]" else {field: value}))
    assert error.status == 400
    assert (error.param or "").startswith(field)
    said = json.loads(error.body())["error"]
    assert said["type"] == "invalid_request_error"
    assert field in said["message"]


BAD_PROMPTS = (None, "", 7, [], ["a", ""], ["a", 1], [1, -2], [1, 2.0], [True], [[1], []], [[]], {}, [2**31])


@pytest.mark.parametrize("prompt", [*BAD_PROMPTS, ["a"] * 65])
def test_a_bad_prompt(prompt: Any) -> None:
    assert refused(TEXT | {"prompt": prompt}, chat=False).param == "prompt"


@pytest.mark.parametrize(
    ("prompt", "read"),
    [
        ("hi", [Prompt("hi")]),
        (["hi"], [Prompt("hi")]),
        (["a", "b"], [Prompt("a"), Prompt("b")]),
        ([1, 0, 3], [Prompt(ids=(1, 0, 3))]),
        ([[1, 2], [3]], [Prompt(ids=(1, 2)), Prompt(ids=(3,))]),
        (["a", [3]], [Prompt("a"), Prompt(ids=(3,))]),
    ],
)
def test_prompts_in_all_forms_of_the_api(prompt: Any, read: list[Prompt]) -> None:
    ask = parse(json.dumps(TEXT | {"prompt": prompt, "n": 2}).encode(), chat=False, model="m")
    assert list(ask.prompts) == read
    assert ask.choices == 2 * len(read)


def test_choices_are_bounded_together() -> None:
    assert refused(TEXT | {"prompt": ["a"] * 64, "n": 3}, chat=False).param == "n"


def test_what_is_not_said() -> None:
    text = parse(json.dumps(TEXT).encode(), chat=False, model="m")
    assert (text.max_tokens, text.seed, text.temperature, text.top_p, text.n) == (16, None, 1.0, 1.0, 1)
    assert parse(json.dumps(CHAT).encode(), chat=True, model="m").max_tokens is None


def test_an_unknown_model_is_a_404() -> None:
    error = refused(CHAT | {"model": "gpt-9"})
    assert (error.status, error.code, error.param) == (404, "model_not_found", "model")


def test_what_clients_really_send() -> None:
    body = CHAT | {
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        ],
        "max_completion_tokens": 5,
        "max_tokens": None,
        "stop": "x",
        "n": 1,
        "user": "somebody",
        "top_p": 0.5,
        "logprobs": False,
        "response_format": {"type": "text"},
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    ask = parse(json.dumps(body).encode(), chat=True, model="m")
    turns = (Message("system", "be brief"), Message("user", "ab"))
    assert ask.prompts == (Prompt("system: be brief\nuser: ab", messages=turns),)
    assert (ask.max_tokens, ask.stop, ask.top_p) == (5, ("x",), 0.5)
    assert ask.stream
    assert ask.include_usage


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
_FIELDS = (
    "model",
    "prompt",
    "messages",
    "max_tokens",
    "n",
    "seed",
    "stop",
    "stream",
    "temperature",
    "suffix",
    "top_p",
    "ignore_eos",
    "return_token_ids",
    "stream_options",
    "max_completion_tokens",
    "presence_penalty",
    "logit_bias",
)


@given(body=st.dictionaries(st.sampled_from(_FIELDS), _JSON), chat=st.booleans())
def test_any_object_is_either_understood_or_refused(body: dict[str, Any], chat: bool) -> None:
    refusal: ApiError | None = None
    try:
        ask = parse(json.dumps(body).encode(), chat=chat, model="m")
    except ApiError as error:
        refusal = error
    if refusal is not None:
        assert refusal.status in (400, 404)
    else:
        assert all(one.text or one.ids for one in ask.prompts)
        assert ask.max_tokens is None or 1 <= ask.max_tokens <= MAX_TOKENS


def _cut(pieces: list[str], stops: list[str]) -> str:
    cutter, out = Cutter(stops), ""
    for piece in pieces:
        out += cutter.feed(piece)
    return out + cutter.rest()


@given(
    pieces=st.lists(st.text("abc", max_size=4), max_size=12),
    stops=st.lists(st.text("abc", min_size=1, max_size=3), max_size=3),
)
def test_however_a_text_is_split_nothing_of_a_stop_string_gets_out(
    pieces: list[str], stops: list[str]
) -> None:
    """Against the plain reading: letter by letter, until the text so far ends in a stop string."""
    text = "".join(pieces)
    ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    plain = text
    if ends:
        here = text[: ends[0]]
        plain = here[: -max(len(stop) for stop in stops if here.endswith(stop))]
    assert _cut(pieces, stops) == plain


def test_a_stop_string_inside_another_one_ends_first() -> None:
    for pieces in (["abcd"], ["ab", "cd"], ["a", "b", "c", "d"]):
        assert _cut(pieces, ["abcd", "bc"]) == "a"


def test_only_what_could_become_a_stop_string_is_held_back() -> None:
    cutter = Cutter(["END"])
    assert cutter.feed("say E") == "say "
    assert cutter.feed("x") == "Ex"
    assert cutter.feed(" EN") == " "
    assert cutter.feed("D more") == ""
    assert cutter.stopped
    assert cutter.feed("never") == ""
    assert cutter.rest() == ""
