"""The official `openai` client against a real executor: what it reads, and which exceptions it raises."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from services.engine import GenerateRequest
from services.faults import Refused
from tests.contract.executor_process import Executor, executor
from tests.unit.executor import running
from tests.unit.scripted import Scripted

pytestmark = [pytest.mark.real, pytest.mark.torch]

IP, BROKEN = "127.107.13.10", "127.107.13.11"
HI: Any = [{"role": "user", "content": "how deep is the water"}]


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Executor]:
    with executor(tmp_path_factory.mktemp("executor"), IP) as it:
        yield it


@pytest.fixture(scope="module")
def client(serving: Executor) -> Iterator[Any]:
    import openai

    with openai.OpenAI(base_url=f"http://{IP}:9000/v1", api_key="none", max_retries=0, timeout=60) as it:
        yield it


def test_a_chat_whole_and_streamed_is_the_same(client: Any) -> None:
    ask = {"model": "echo-1", "messages": HI, "max_tokens": 6, "seed": 4, "temperature": 0.5}
    whole = client.chat.completions.create(**ask)
    assert (whole.object, whole.model, whole.choices[0].finish_reason) == (
        "chat.completion",
        "echo-1",
        "length",
    )
    assert len(whole.choices[0].message.content.split()) == 6
    assert whole.usage.completion_tokens == 6
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage == whole.usage


def test_completions_with_n_and_several_prompts(client: Any) -> None:
    answer = client.completions.create(model="echo-1", prompt=["a", "b"], n=2, max_tokens=3, seed=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage.total_tokens == 2 + 12
    stream = client.completions.create(model="echo-1", prompt="a", n=3, max_tokens=3, seed=1, stream=True)
    texts: dict[int, str] = {}
    for chunk in stream:
        texts[chunk.choices[0].index] = texts.get(chunk.choices[0].index, "") + chunk.choices[0].text
    assert texts == dict.fromkeys(range(3), answer.choices[0].text)


def test_stop_strings_and_vllms_extensions(client: Any) -> None:
    ask: Any = {"model": "echo-1", "prompt": [1, 2, 3], "max_tokens": 8, "seed": 1}
    plain = client.completions.create(**ask, extra_body={"return_token_ids": True, "ignore_eos": True})
    assert len(plain.choices[0].token_ids) == 8
    stop = plain.choices[0].text.split()[2]
    cut = client.completions.create(**ask, stop=[stop, "never"])
    assert (cut.choices[0].text, cut.choices[0].finish_reason) == (
        plain.choices[0].text.split(stop)[0],
        "stop",
    )


def test_the_models(client: Any) -> None:
    import openai

    assert [model.id for model in client.models.list()] == ["echo-1"]
    assert client.models.retrieve("echo-1").id == "echo-1"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("somebody/else")


def test_headers_are_there_for_who_looks(client: Any) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model="echo-1", messages=HI, max_tokens=1, extra_headers={"x-request-id": "mine"}
    )
    assert raw.request_id == "mine"
    assert raw.headers["x-weir-engine"] == "echo"


@pytest.mark.parametrize(
    ("change", "kind", "param"),
    [
        ({"max_tokens": 0}, "BadRequestError", "max_tokens"),
        ({"max_tokens": -1}, "BadRequestError", "max_tokens"),
        ({"max_tokens": 10**12}, "BadRequestError", "max_tokens"),
        ({"n": 1000}, "BadRequestError", "n"),
        ({"messages": []}, "BadRequestError", "messages"),
        ({"temperature": "warm"}, "BadRequestError", "temperature"),
        ({"model": "gpt-9"}, "NotFoundError", "model"),
    ],
)
def test_refusals_are_its_own_exceptions(client: Any, change: Any, kind: str, param: str) -> None:
    import openai

    with pytest.raises(getattr(openai, kind)) as caught:
        client.chat.completions.create(**({"model": "echo-1", "messages": HI} | change))
    assert caught.value.param == param


def test_a_failing_engine_is_an_internal_error_and_a_cut_stream_an_api_error(tmp_path: Any) -> None:
    import openai

    with (
        executor(tmp_path, BROKEN, "--option", "die_after=2") as it,
        openai.OpenAI(base_url=f"http://{BROKEN}:9000/v1", api_key="none", max_retries=0) as client,
    ):
        stream = client.chat.completions.create(model="echo-1", messages=HI, max_tokens=9, stream=True)
        seen = []
        with pytest.raises(openai.APIError) as caught:
            seen += [chunk.choices[0].delta.content for chunk in stream]
        assert caught.value.code == "engine_dead"
        with pytest.raises(openai.InternalServerError) as refused:
            client.chat.completions.create(model="echo-1", messages=HI, max_tokens=9)
        assert (refused.value.status_code, refused.value.code) == (503, "engine_dead")
        assert it.get("/health") == 503


class FullOnce(Scripted):
    """The queue is full for the first one."""

    def size(self, request: GenerateRequest) -> int:
        if not self.seen:
            self.seen.append(request)
            raise Refused(429, "queue_full", "1024 wait already", retry_after_s=0.05)
        return 1


def test_its_own_retry_gets_through_when_the_queue_has_room_again() -> None:
    async def main() -> None:
        import openai

        async with (
            running(FullOnce(["fine"])) as it,
            openai.AsyncOpenAI(base_url=f"{it.base}/v1", api_key="none", max_retries=1, timeout=60) as client,
        ):
            answer = await client.chat.completions.create(model="echo-1", messages=HI)
            assert answer.choices[0].message.content == "fine"
            assert it.sample("weir_executor_requests_total", code="429") == 1

    asyncio.run(main())
