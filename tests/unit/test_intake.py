"""How long an answer may become: what context, cache and client say, and what is only guessed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from services.batching import Scheduled
from services.engine import EngineFacts
from services.fallback.engine import FallbackEngine
from tests.unit.executor import CHAT, CHAT_PATH, TEXT, TEXT_PATH, Running, served
from tests.unit.scripted import Scripted

SHORT = EngineFacts("scripted", "echo-1", context=20)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (TEXT_PATH, TEXT | {"prompt": "x" * 20}, "prompt"),
        (TEXT_PATH, TEXT | {"prompt": "x" * 500}, "prompt"),
        (TEXT_PATH, TEXT | {"prompt": [1] * 20}, "prompt"),
        (TEXT_PATH, TEXT | {"max_tokens": 21}, "max_tokens"),
        (TEXT_PATH, TEXT | {"prompt": ["hi", "x" * 30]}, "prompt"),
        (CHAT_PATH, CHAT | {"messages": [{"role": "user", "content": "x" * 30}]}, "messages"),
    ],
)
def test_what_the_context_can_not_hold_is_refused_before_work(
    path: str, body: dict[str, Any], param: str
) -> None:
    engine = Scripted(["a"], facts=SHORT)

    async def test(it: Running) -> None:
        status, said = await it.post(path, body)
        assert (status, said["error"]["code"]) == (400, "context_length_exceeded")
        assert said["error"]["param"] == param
        assert not engine.seen

    served(test, engine=engine)


@pytest.mark.parametrize("asked", [19, 20])
def test_who_asks_for_more_than_the_prompt_leaves_gets_what_is_left(asked: int) -> None:
    """As with vLLM."""
    engine = Scripted(["a"], facts=SHORT)

    async def test(it: Running) -> None:
        assert (await it.post(TEXT_PATH, TEXT | {"prompt": "hello", "max_tokens": asked}))[0] == 200
        assert engine.seen[0].max_tokens == 20 - len("hello")

    served(test, engine=engine)


def test_a_guessed_size_refuses_nothing_and_shortens_nothing() -> None:
    """The server behind counts, and refuses what is too long."""
    guess = replace(SHORT, context=1000, kv_tokens=1000, estimates=True)
    engine = Scripted(["a"], facts=guess)
    long = "x" * 5000

    async def test(it: Running) -> None:
        plain = {"messages": [{"role": "user", "content": long}]}
        assert (await it.post(TEXT_PATH, TEXT | {"prompt": long, "max_tokens": 900}))[0] == 200
        assert (await it.post(CHAT_PATH, plain))[0] == 200
        assert [job.max_tokens for job in engine.seen] == [900, 256]
        assert engine.seen[1].open_ended
        for known in ({"max_tokens": 1001}, {"prompt": [1] * 1000}):
            assert (await it.post(TEXT_PATH, TEXT | known))[0] == 400

    served(test, engine=Scheduled(engine))


def test_a_fallback_shortens_nothing_by_a_guess_either() -> None:
    """Who asks for all there is stays with the first engine, whose server knows what its context leaves."""
    first = Scripted(["a"], facts=EngineFacts("first", "echo-1", context=1000, estimates=True))
    second = Scripted(["b"], facts=EngineFacts("second", "echo-1", context=4000))

    async def test(it: Running) -> None:
        assert (await it.post(TEXT_PATH, TEXT | {"prompt": "x" * 600, "max_tokens": 3995}))[0] == 200
        assert [job.max_tokens for job in first.seen] == [1000]

    served(test, engine=FallbackEngine(Scheduled(first), second))


def test_a_chat_that_names_no_limit_gets_what_the_context_leaves() -> None:
    async def test(it: Running) -> None:
        plain = {"messages": CHAT["messages"]}
        assert (await it.post(CHAT_PATH, plain))[0] == 200
        assert engine.seen[0].max_tokens == 20 - len("user: hi")
        assert engine.seen[0].messages[0].content == "hi"
        async with it.http.get(it.base + "/v1/models") as answer:
            assert (await answer.json())["data"][0]["max_model_len"] == 20

    engine = Scripted(["a"], facts=SHORT)
    served(test, engine=engine)


@pytest.mark.parametrize(
    ("context", "kv_tokens", "given"),
    [(20, 0, 12), (20, 16, 8), (20, 19, 8), (20, 8, 1), (10**6, 0, 4096), (10**6, 3200, 3192), (0, 0, 256)],
)
def test_what_it_gets_is_bounded_by_cache_and_by_courtesy(context: int, kv_tokens: int, given: int) -> None:
    """The text user: hi is 8 tokens here, and a block is 16."""
    block = 16 if kv_tokens >= 16 else 1
    facts = EngineFacts("scripted", "echo-1", context=context, kv_tokens=kv_tokens, kv_block=block)
    engine = Scripted(["a"], facts=facts)

    async def test(it: Running) -> None:
        assert (await it.post(CHAT_PATH, {"messages": CHAT["messages"]}))[0] == 200
        assert engine.seen[0].max_tokens == given

    served(test, engine=engine)


def test_where_the_engine_keeps_a_window_the_cache_is_no_bound() -> None:
    facts = EngineFacts("scripted", "echo-1", context=1000, kv_tokens=64, kv_window=16, kv_chunk=8)
    engine = Scripted(["a"], facts=facts)

    async def test(it: Running) -> None:
        assert (await it.post(CHAT_PATH, {"messages": CHAT["messages"]}))[0] == 200
        assert engine.seen[0].max_tokens == 1000 - len("user: hi")

    served(test, engine=engine)
