"""Several sequences in one answer: n, several prompts, token ids, usage; and that they end together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from services.engine import GenerateRequest, Token
from services.engines.echo import Source
from services.faults import BadLogits, OutOfDeviceMemory, Refused
from tests.unit.executor import CHAT, CHAT_PATH, TEXT, TEXT_PATH, Running, served
from tests.unit.scripted import HANG, Scripted


def by_index(chunks: list[Any], what: str = "text") -> dict[int, str]:
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            piece = choice["text"] if what == "text" else choice["delta"]["content"]
            texts[choice["index"]] = texts.get(choice["index"], "") + piece
    return texts


def test_n_choices_come_at_once_each_with_its_index() -> None:
    engine = Scripted(["a", "b", "c"])

    async def test(it: Running) -> None:
        status, body = await it.post(CHAT_PATH, CHAT | {"n": 3})
        assert status == 200
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
        assert {choice["message"]["content"] for choice in body["choices"]} == {"abc"}
        assert body["usage"] == {"prompt_tokens": 8, "completion_tokens": 9, "total_tokens": 17}
        assert [job.sample for job in engine.seen] == [0, 1, 2]
        assert len({job.request_id for job in engine.seen}) == 3
        assert {job.seed for job in engine.seen} == {9}

    served(test, engine=engine)


def test_streamed_choices_are_interleaved_and_each_is_whole() -> None:
    async def test(it: Running) -> None:
        usage = {"stream_options": {"include_usage": True}}
        *chunks, last = await it.chunks(CHAT_PATH, CHAT | {"n": 4} | usage)
        order = [chunk["choices"][0]["index"] for chunk in chunks]
        assert sorted(order) == [i for i in range(4) for _ in range(3)]
        assert order != sorted(order), "one after the other is not at the same time"
        assert by_index(chunks, "delta") == dict.fromkeys(range(4), "abc")
        firsts = [chunk["choices"][0] for chunk in chunks if "role" in chunk["choices"][0]["delta"]]
        assert sorted(choice["index"] for choice in firsts) == [0, 1, 2, 3]
        assert last["usage"]["completion_tokens"] == 12

    served(test, engine=Scripted(["a", "b", "c"]))


def test_several_prompts_are_several_choices() -> None:
    async def test(it: Running) -> None:
        ask = TEXT | {"prompt": ["first", "second"], "n": 2, "max_tokens": 3}
        _, body = await it.post(TEXT_PATH, ask)
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
        texts = ["".join(Source(prompt, 0).at(i)[1] for i in range(3)) for prompt in ("first", "second")]
        assert [choice["text"] for choice in body["choices"]] == [texts[0], texts[0], texts[1], texts[1]]
        # 2 + 2 tokens of prompts, each counted once.
        assert body["usage"] == {"prompt_tokens": 4, "completion_tokens": 12, "total_tokens": 16}
        assert by_index(await it.chunks(TEXT_PATH, ask)) == {
            0: texts[0],
            1: texts[0],
            2: texts[1],
            3: texts[1],
        }

    served(test)


def test_prompts_of_token_ids_reach_the_engine_as_such() -> None:
    engine = Scripted(["x"])

    async def test(it: Running) -> None:
        _, body = await it.post(TEXT_PATH, TEXT | {"prompt": [[5, 6, 7], [8]]})
        assert [job.prompt_ids for job in engine.seen] == [(5, 6, 7), (8,)]
        assert body["usage"]["prompt_tokens"] == 4

    served(test, engine=engine)


def test_token_ids_come_whole_and_streamed_when_asked_for() -> None:
    # The second token has no text: half a character.
    script = [Token(7, "a", None, 1, "x"), Token(8, "", None, 0, "x"), Token(9, "ä", None, 0, "x"), "!"]

    async def test(it: Running) -> None:
        _, body = await it.post(TEXT_PATH, TEXT | {"return_token_ids": True, "ignore_eos": True})
        assert body["choices"][0]["token_ids"] == [7, 8, 9, 3]
        chunks = await it.chunks(TEXT_PATH, TEXT | {"return_token_ids": True})
        assert [chunk["choices"][0]["token_ids"] for chunk in chunks] == [[7], [8], [9], [3]]
        _, plain = await it.post(TEXT_PATH, TEXT)
        assert "token_ids" not in plain["choices"][0]

    engine = Scripted(script)
    served(test, engine=engine)
    assert [job.ignore_eos for job in engine.seen] == [True, False, False]


def test_ids_that_only_the_upstream_server_knows_are_null_not_a_part_of_them() -> None:
    async def test(it: Running) -> None:
        _, body = await it.post(TEXT_PATH, TEXT | {"return_token_ids": True})
        assert body["choices"][0]["token_ids"] is None

    served(test, engine=Scripted([Token(4, "a", None, 1, "x"), Token(-1, "b", None, 0, "x"), "c"]))


def test_one_sequence_that_fails_ends_all_of_them() -> None:
    async def test(it: Running) -> None:
        status, said = await it.post(TEXT_PATH, TEXT | {"n": 3})
        assert (status, said["error"]["code"]) == (503, "bad_logits")
        assert engine.running == 0
        seen = await it.cut(TEXT_PATH, TEXT | {"n": 3})
        assert seen[-1]["error"]["code"] == "bad_logits"
        assert engine.running == 0

    engine = Scripted(["a", "b", BadLogits("NaN")])
    served(test, engine=engine)


class Closed(Scripted):
    """It was closed after the request was checked (services/pool/renewable.py): there is no iterator."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Token, None]:
        raise Refused(503, "engine_closed", "the instance sleeps or starts anew")


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("streams", [True, False])
def test_an_engine_that_was_closed_meanwhile_is_a_503_in_openais_form(n: int, streams: bool) -> None:
    async def test(it: Running) -> None:
        status, said = await it.post(TEXT_PATH, TEXT | {"n": n, "stream": streams})
        assert (status, said["error"]["code"]) == (503, "engine_closed")

    served(test, engine=Closed())


class OneFailing(Scripted):
    """Sample 0 fails at its second token, the others hang there."""

    def __init__(self) -> None:
        super().__init__(["a", HANG])
        self._worse = Scripted(["a", OutOfDeviceMemory("step 2")])

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Token, None]:
        return (self._worse if request.sample == 0 else super()).generate(request)


@pytest.mark.parametrize("streams", [True, False])
def test_sequences_that_hang_are_ended_by_one_that_fails(streams: bool) -> None:
    engine = OneFailing()

    async def test(it: Running) -> None:
        if streams:
            assert (await it.cut(TEXT_PATH, TEXT | {"n": 4}))[-1]["error"]["code"] == "out_of_memory"
        else:
            assert (await it.post(TEXT_PATH, TEXT | {"n": 4}))[0] == 503
        assert engine.running == 0
        assert engine.closed == 3

    served(test, engine=engine)


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_leaves_ends_all_its_sequences(streams: bool) -> None:
    engine = Scripted(["a", HANG])

    async def test(it: Running) -> None:
        work = asyncio.create_task(it.read(TEXT_PATH, TEXT | {"n": 5, "stream": streams}))
        await it.until(lambda: engine.running == 5)
        work.cancel()
        await it.until(lambda: engine.running == 0 and it.instance.in_flight == 0)
        assert engine.closed == 5

    served(test, engine=engine)


def test_a_slow_reader_holds_its_engine_back_and_not_the_memory() -> None:
    """What is made ahead is bounded by queue and socket buffers, not by the length of the answer."""
    engine = Scripted(["x" * 2000] * 20_000)

    async def test(it: Running) -> None:
        async with it.http.post(it.base + TEXT_PATH, json=TEXT | {"n": 2, "stream": True}) as answer:
            assert await answer.content.readuntil(b"\n\n")
            await it.until(lambda: it.instance.tally.tokens > 2)
            before = -1
            while before != (now := it.instance.tally.tokens):  # until it stands still
                before = now
                await asyncio.sleep(0.2)
            assert now < 40_000 / 4
            answer.close()
        await it.until(lambda: engine.running == 0)

    served(test, engine=engine)
