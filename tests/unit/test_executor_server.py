"""The executor's server over a real socket: OpenAI's answers, SSE, refusals, faults, clients that leave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest
from multidict import CIMultiDict

from mesh.clock import SystemClock
from services.engine import EngineStats, GenerateRequest, Token
from services.engines.echo import EchoEngine, EchoOptions, Source
from services.instance import Instance
from services.lifecycle import State
from services.listener import Listener
from services.server import MAX_BODY, Server
from tests.sse import events
from tests.unit.executor import CHAT, CHAT_PATH, TEXT, TEXT_PATH, WHO, Running, served


def words(prompt: str, seed: int, count: int) -> list[str]:
    source = Source(prompt, seed)
    return [source.at(i)[1] for i in range(count)]


def test_a_chat_answer_in_one_piece() -> None:
    async def test(it: Running) -> None:
        async with it.http.post(it.base + CHAT_PATH, json=CHAT) as answer:
            body = await answer.json()
            assert answer.headers["x-weir-instance"] == "chat-canary-1"
            assert (answer.headers["x-weir-region"], answer.headers["x-weir-stage"]) == (
                "westeurope",
                "canary",
            )
        assert (body["object"], body["model"]) == ("chat.completion", "echo-1")
        message = {"role": "assistant", "content": "".join(words("user: hi", 9, 5))}
        [choice] = body["choices"]
        assert (choice["message"], choice["finish_reason"], choice["index"]) == (message, "length", 0)
        assert body["usage"] == {"prompt_tokens": 2, "completion_tokens": 5, "total_tokens": 7}

    served(test)


def test_a_stream_says_the_same_as_one_piece() -> None:
    async def test(it: Running) -> None:
        *chunks, done = await it.stream(CHAT_PATH, CHAT)
        parsed = [json.loads(chunk) for chunk in chunks]
        assert done == "[DONE]"
        assert {chunk["object"] for chunk in parsed} == {"chat.completion.chunk"}
        assert len({chunk["id"] for chunk in parsed}) == 1
        choices = [chunk["choices"][0] for chunk in parsed]
        assert [choice["delta"].get("role") for choice in choices] == ["assistant", None, None, None, None]
        assert [choice["finish_reason"] for choice in choices] == [None] * 4 + ["length"]
        text = "".join(choice["delta"]["content"] for choice in choices)
        _, whole = await it.post(CHAT_PATH, CHAT)
        assert text == whole["choices"][0]["message"]["content"]

    served(test)


def test_usage_at_the_end_of_a_stream_if_asked() -> None:
    async def test(it: Running) -> None:
        *_, usage, done = await it.stream(TEXT_PATH, TEXT | {"stream_options": {"include_usage": True}})
        assert done == "[DONE]"
        assert json.loads(usage)["choices"] == []
        assert json.loads(usage)["usage"] == {"prompt_tokens": 1, "completion_tokens": 5, "total_tokens": 6}

    served(test)


@pytest.mark.parametrize("cut", [3, 4, 9])
def test_a_stop_string_ends_the_text_before_it(cut: int) -> None:
    text = "".join(words("hi", 0, 5))
    stop = text[cut : cut + 4]
    wanted = text[: text.index(stop)]

    async def test(it: Running) -> None:
        _, whole = await it.post(TEXT_PATH, TEXT | {"stop": stop})
        assert (whole["choices"][0]["text"], whole["choices"][0]["finish_reason"]) == (wanted, "stop")
        chunks = [json.loads(e) for e in (await it.stream(TEXT_PATH, TEXT | {"stop": [stop]}))[:-1]]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == wanted
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"

    served(test)


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (b"{", 400, None),
        (CHAT | {"max_tokens": 0}, 400, "max_tokens"),
        (CHAT | {"max_tokens": -5}, 400, "max_tokens"),
        (CHAT | {"max_tokens": 10**12}, 400, "max_tokens"),
        (CHAT | {"messages": "hi"}, 400, "messages"),
        (CHAT | {"n": 1000}, 400, "n"),
        (CHAT | {"model": "gpt-9"}, 404, "model"),
        (b'{"prompt": "' + b"x" * MAX_BODY + b'"}', 413, None),
    ],
)
def test_refusals_are_in_openais_form(body: Any, status: int, param: str | None) -> None:
    async def test(it: Running) -> None:
        got, said = await it.post(CHAT_PATH, body)
        assert got == status
        assert set(said["error"]) == {"message", "type", "param", "code"}
        assert (said["error"]["param"], said["error"]["type"]) == (param, "invalid_request_error")
        assert (
            it.instance.registry.get_sample_value("weir_executor_requests_total", {"code": str(status)}) == 1
        )

    served(test)


def test_what_is_not_there_is_refused_in_the_same_form() -> None:
    async def test(it: Running) -> None:
        assert (await it.post("/v1/nothing", TEXT))[0] == 404
        assert (await it.post("/echo", TEXT))[0] == 404, "only with --debug"
        async with it.http.get(it.base + TEXT_PATH) as answer:
            assert (answer.status, answer.headers["allow"]) == (405, "POST")
            assert (await answer.json())["error"]["type"] == "invalid_request_error"

    served(test)


def test_models_and_echo() -> None:
    async def test(it: Running) -> None:
        twice = CIMultiDict([("X-A", "1"), ("X-A", "2")])
        async with it.http.get(it.base + "/v1/models") as answer:
            assert [model["id"] for model in (await answer.json())["data"]] == ["echo-1"]
        async with it.http.get(it.base + "/echo?a=1", headers=twice) as answer:
            body = await answer.json()
        assert (body["path"], body["headers"]["x-a"]) == ("/echo?a=1", ["1", "2"])

    served(test, debug=True)


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_leaves_frees_its_slot(streams: bool) -> None:
    async def test(it: Running) -> None:
        ask = TEXT | {"max_tokens": 30_000, "stream": streams}
        work = asyncio.create_task(it.post(TEXT_PATH, ask)) if not streams else None
        if streams:
            async with it.http.post(it.base + TEXT_PATH, json=ask) as answer:
                assert await answer.content.readuntil(b"\n\n")
                assert it.instance.engine.stats().running == 1
                answer.close()
        else:
            assert work is not None
            await it.until(lambda: it.instance.engine.stats().running == 1)
            work.cancel()
        await it.until(lambda: it.instance.in_flight == 0 and it.instance.engine.stats().running == 0)
        assert it.instance.engine.stats().tokens < 30_000
        assert it.instance.registry.get_sample_value("weir_executor_requests_total", {"code": "499"}) == 1
        assert (await it.post(TEXT_PATH, TEXT | {"max_tokens": 1}))[0] == 200, "the only slot is free again"

    served(test, token_cost_ms=2, slots=1)


def test_a_hanging_engine_holds_its_client_and_nobody_else() -> None:
    async def test(it: Running) -> None:
        hung = asyncio.create_task(it.post(TEXT_PATH, TEXT))
        await it.until(lambda: it.instance.engine.stats().running == 1)
        assert await it.status("/health") == 200
        assert (await it.post(TEXT_PATH, TEXT | {"max_tokens": 2}))[0] == 200
        assert not hung.done()
        hung.cancel()
        await it.until(lambda: it.instance.in_flight == 0)

    served(test, hang_after=2)


def test_an_engine_that_dies_before_the_first_token_is_a_clean_503_and_ill() -> None:
    async def test(it: Running) -> None:
        assert await it.status("/health") == 200
        status, said = await it.post(CHAT_PATH, CHAT | {"stream": True})
        assert (status, said["error"]["type"], said["error"]["code"]) == (503, "server_error", "engine_dead")
        assert (await it.status("/health"), await it.status("/ready")) == (503, 503)
        assert (await it.post(CHAT_PATH, CHAT))[0] == 503

    served(test, die_after=0)


def test_an_engine_that_dies_in_the_middle_cuts_the_stream_without_a_proper_end() -> None:
    async def test(it: Running) -> None:
        seen = b""
        with pytest.raises(aiohttp.ClientPayloadError):  # noqa: PT012
            async with it.http.post(it.base + TEXT_PATH, json=TEXT | {"stream": True}) as answer:
                async for part in answer.content.iter_any():
                    seen += part
        *chunks, last = events(seen)
        assert len(chunks) == 3
        assert "died" in json.loads(last)["error"]["message"]
        await it.until(lambda: it.instance.in_flight == 0)

    served(test, die_after=3)


class Broken(EchoEngine):
    """Breaks the Engine protocol: raises what it should not, or ends without a finish."""

    def __init__(self, error: Exception | None) -> None:
        super().__init__(EchoOptions())
        self._error = error

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Token, None]:
        yield Token(1, "a")
        if self._error is not None:
            raise self._error


@pytest.mark.parametrize(("error", "status"), [(KeyError("secret"), 500), (None, 503)])
def test_an_engine_with_a_bug_is_an_error_in_the_right_form(error: Exception | None, status: int) -> None:
    async def test(it: Running) -> None:
        got, said = await it.post(TEXT_PATH, TEXT)
        assert (got, said["error"]["type"]) == (status, "server_error")
        assert "secret" not in said["error"]["message"]
        assert await it.status("/health") == 200

    served(test, engine=Broken(error))


def test_ready_says_no_while_draining_or_asleep_and_health_says_alive() -> None:
    async def test(it: Running) -> None:
        assert await it.status("/ready") == 200
        life = it.instance.lifecycle
        life.to(State.DRAINING)
        assert (await it.status("/ready"), await it.status("/health")) == (503, 200)
        await it.instance.engine.sleep()
        life.to(State.ASLEEP)
        assert (await it.status("/ready"), await it.status("/health")) == (503, 200)
        assert (await it.post(TEXT_PATH, TEXT))[0] == 503
        await it.instance.engine.wake()
        life.to(State.WAKING)
        life.to(State.RUNNING)
        assert (await it.status("/ready"), (await it.post(TEXT_PATH, TEXT))[0]) == (200, 200)
        it.instance.lifecycle.leave()
        assert (await it.status("/ready"), await it.status("/health")) == (503, 200)
        assert (await it.post(TEXT_PATH, TEXT))[0] == 200, "who comes late is served"

    served(test)


def test_ready_says_no_while_the_engine_can_do_nothing_and_yes_when_it_can_again() -> None:
    async def test(it: Running) -> None:
        away, here = EngineStats(capacity=0.0), it.instance.engine.stats()
        it.instance.engine = cast(Any, SimpleNamespace(stats=lambda: away))
        assert (await it.status("/ready"), await it.status("/health")) == (503, 200)
        it.instance.engine = cast(Any, SimpleNamespace(stats=lambda: here))
        assert await it.status("/ready") == 200

    served(test)


def test_metrics_tell_what_happened() -> None:
    async def test(it: Running) -> None:
        await it.post(TEXT_PATH, TEXT)
        await it.stream(CHAT_PATH, CHAT)
        async with it.http.get(it.base + "/metrics") as answer:
            lines = (await answer.text()).splitlines()
        for line in (
            'weir_executor_requests_total{code="200"} 2.0',
            "weir_executor_tokens_total 10.0",
            "weir_executor_running 0.0",
            "weir_executor_waiting 0.0",
            "weir_executor_in_flight 0.0",
        ):
            assert line in lines

    served(test)


def test_many_at_once_are_all_answered_and_the_slots_come_back() -> None:
    async def test(it: Running) -> None:
        answers = await asyncio.gather(*(it.post(TEXT_PATH, TEXT | {"seed": n}) for n in range(60)))
        assert [status for status, _ in answers] == [200] * 60
        for n, (_, body) in enumerate(answers):
            assert body["choices"][0]["text"] == "".join(words("hi", n, 5))
        assert it.instance.engine.stats().running == 0

    served(test, slots=4, token_cost_ms=0.1)


OWN = "127.107.99.1"
"""Where nobody else's connection may take the port meanwhile."""


def test_a_stopped_listener_frees_its_address() -> None:
    async def main() -> None:
        instance = Instance(WHO, EchoEngine(EchoOptions()))
        first = Listener(Server(instance, SystemClock()).app(), OWN, 0)
        await first.start()
        port = first.port
        second = Listener(Server(instance, SystemClock()).app(), OWN, port)
        with pytest.raises(OSError, match="in use"):
            await second.start()
        await second.stop()
        await first.stop()
        third = Listener(Server(instance, SystemClock()).app(), OWN, port)
        await third.start()
        await third.stop()

    asyncio.run(main())
