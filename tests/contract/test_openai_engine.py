"""The openai engine and servers that are late, gone, wrong, or want a key."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from regions.cli.errors import UsageError, WeirError
from services.engine import FinishReason, GenerateRequest
from services.engines.openai import base_url, make
from services.faults import EngineFault, EngineHung, Refused
from services.telemetry.outgoing import Carrying
from services.upstream import client
from services.vllm.process import free_port
from tests.contract.engine_suite import answer, until
from tests.unit.executor import TEXT_PATH, running
from tests.virtual import leap, run_leaping

pytestmark = pytest.mark.real
ASK = GenerateRequest("r-1", "hello", 4)
KEY = "s3cret-of-the-house"


class Server:
    """A server as small as the API allows. Chunks are given by the test, in bytes and in the order of
    sending; None breaks the connection off."""

    def __init__(self) -> None:
        self.port = free_port()
        self.chunks: list[bytes | None] = []
        self.seen: list[Any] = []
        self.headers: list[dict[str, str]] = []
        self.model: dict[str, Any] = {"id": "m", "owned_by": "acme"}
        self.key, self.status, self.hang = "", 200, False
        self.gone = asyncio.Event()
        self.peers: set[Any] = set()

    async def models(self, request: web.Request) -> web.Response:
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": {"message": "no key, no answer"}}, status=401)
        return web.json_response({"data": [self.model]})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        self.seen.append(await request.json())
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        self.peers.add(request.transport and request.transport.get_extra_info("peername"))
        if self.status != 200:
            return web.json_response({"error": {"message": "as ordered"}}, status=self.status)
        out = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await out.prepare(request)
        for chunk in self.chunks:
            if chunk is None:
                assert request.transport is not None
                request.transport.abort()
                return out
            await out.write(chunk)
        if self.hang:
            try:
                await asyncio.Event().wait()
            finally:
                self.gone.set()
        return out

    @contextlib.asynccontextmanager
    async def up(self) -> AsyncIterator[str]:
        app = web.Application()
        app.add_routes([web.get("/v1/models", self.models), web.post("/v1/completions", self.complete)])
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", self.port).start()
            yield f"http://127.0.0.1:{self.port}"
        finally:
            await runner.cleanup()

    @contextlib.asynccontextmanager
    async def engine(self, served: str = "m", **options: str) -> AsyncIterator[Any]:
        it = make(served, {"base_url": f"http://127.0.0.1:{self.port}", "start_s": "20"} | options)
        try:
            await it.start()
            yield it
        finally:
            await it.close()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an error says is read here however long it takes to come."""
    monkeypatch.setattr(client, "ERROR_S", 60.0)


def whole(*texts: str) -> list[bytes | None]:
    events = [
        f'data: {{"choices":[{{"index":0,"text":"{text}","finish_reason":null}}]}}\n\n' for text in texts
    ]
    end = 'data: {"choices":[{"index":0,"text":"","finish_reason":"length"}]}\n\ndata: [DONE]\n\n'
    return [event.encode() for event in (*events, end)]


def test_it_waits_for_a_server_that_is_late() -> None:
    async def main() -> None:
        server = Server()
        engine = make("m", {"base_url": f"http://127.0.0.1:{server.port}/v1/", "start_s": "20"})
        starting = asyncio.create_task(engine.start())
        await asyncio.sleep(0)
        assert not starting.done()
        async with server.up():
            await starting
        await engine.close()

    asyncio.run(main())


def test_a_server_that_is_not_there_is_named() -> None:
    async def main() -> None:
        with pytest.raises(WeirError, match="no connection") as caught:
            async with Server().engine(start_s="0"):
                pass
        assert "start_s" in caught.value.way_out

    asyncio.run(main())


def test_a_model_that_it_has_not_got_is_named_with_those_it_has() -> None:
    async def main() -> None:
        server = Server()
        async with server.up():
            with pytest.raises(WeirError, match="it has: m"):
                async with server.engine("other"):
                    pass
            server.chunks = whole("a")
            async with server.engine("ours", model="m") as engine:
                assert engine.facts().model == "ours"
                await answer(engine, ASK)
        assert server.seen[0]["model"] == "m"

    asyncio.run(main())


def test_the_key_is_sent_and_stands_in_no_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HOUSE_KEY", KEY)
    caplog.set_level(logging.DEBUG)

    async def main() -> None:
        server = Server()
        server.key = KEY
        async with server.up():
            with pytest.raises(WeirError, match="no key, no answer"):
                async with server.engine(start_s="0"):
                    pass
            async with server.engine(api_key_env="HOUSE_KEY") as engine:
                server.chunks = whole("a")
                await answer(engine, ASK)
                assert KEY not in repr(engine._client.target)
                server.status = 500
                with pytest.raises(EngineFault) as caught:
                    await answer(engine, ASK)
                assert KEY not in str(caught.value)
        assert server.headers[0]["authorization"] == f"Bearer {KEY}"

    asyncio.run(main())
    assert KEY not in caplog.text
    with pytest.raises(UsageError, match="no such environment variable"):
        make("m", {"base_url": "http://127.0.0.1:1", "api_key_env": "NO_SUCH_VARIABLE"})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is needed"),
        ("127.0.0.1:8000", "no URL"),
        ("http://u:p@host/", "password"),
        ("ftp://host", "no URL"),
    ],
)
def test_a_wrong_url_is_named(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        make("m", {"base_url": text})
    assert base_url("https://h:1/some/v1/") == "https://h:1/some"


def test_a_finish_told_apart_and_characters_cut_in_two() -> None:
    async def main() -> None:
        server = Server()
        raw = b"".join(part for part in whole("wasser", "ström", "🌊") if part)
        server.chunks = [raw[at : at + 7] for at in range(0, len(raw), 7)]
        async with server.up(), server.engine() as engine:
            tokens = await answer(engine, GenerateRequest("r", "x", 3))
        assert [(t.text, t.finish) for t in tokens] == [
            ("wasser", None),
            ("ström", None),
            ("🌊", FinishReason.LENGTH),
        ]
        assert {t.token_id for t in tokens} == {-1}
        assert "return_token_ids" not in server.seen[0], "it doesn't say that it knows the field"

    asyncio.run(main())


def test_one_connection_serves_one_answer_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    # The end of the body comes right after the last event; a busy machine may take its time between the two.
    monkeypatch.setattr(client, "LINGER_S", 60.0)

    async def main() -> None:
        server = Server()
        server.chunks = whole("a")
        async with server.up(), server.engine() as engine:
            for _ in range(3):
                await answer(engine, ASK)
        assert len(server.peers) == 1

    asyncio.run(main())


def test_a_client_that_goes_is_told_to_the_server() -> None:
    async def main() -> None:
        server = Server()
        server.chunks, server.hang = whole("a", "b")[:2], True
        async with server.up(), server.engine() as engine:
            made = engine.generate(ASK)
            await anext(made)
            assert not server.gone.is_set()
            await made.aclose()
            await asyncio.wait_for(server.gone.wait(), 30)
            assert engine.stats().running == 0

    asyncio.run(main())


def test_a_broken_stream_is_a_fault_and_lowers_capacity_until_it_answers_again() -> None:
    async def main() -> None:
        server = Server()
        async with server.up(), server.engine() as engine:
            server.chunks = [*whole("a")[:1], None]
            with pytest.raises(EngineFault, match="after 1 tokens"):
                await answer(engine, ASK)
            assert engine.stats().capacity == 0
            assert not engine.stats().dead
            await until("it is back", lambda: engine.stats().capacity == 1)

    asyncio.run(main())


def test_a_server_that_is_gone_is_a_fault_before_the_first_token() -> None:
    async def main() -> None:
        server = Server()
        async with server.up():
            engine = make("m", {"base_url": f"http://127.0.0.1:{server.port}"})
            await engine.start()
        with pytest.raises(EngineFault, match=r"no connection|connection broke"):
            await answer(engine, ASK)
        assert engine.stats().capacity == 0
        await engine.close()

    asyncio.run(main())


def test_silence_is_a_hang() -> None:
    async def main() -> None:
        server = Server()
        server.chunks, server.hang = whole("a")[:1], True
        async with server.up(), server.engine(token_s="60") as engine:
            made = engine.generate(ASK)
            await anext(made)
            leap(60)
            with pytest.raises(EngineHung, match="after 1 tokens"):
                await anext(made)

    run_leaping(main())


@pytest.mark.parametrize("raw", [b"data: \xff\xfe\n\n", b"data: {}\n\n", b"data: [1]\n\n"])
def test_what_is_no_answer_is_a_fault(raw: bytes) -> None:
    async def main() -> None:
        server = Server()
        server.chunks = [raw]
        async with server.up(), server.engine() as engine:
            with pytest.raises(EngineFault) as caught:
                await answer(engine, ASK)
            assert not isinstance(caught.value, Refused)

    asyncio.run(main())


def test_a_refusal_leaves_the_server_in_good_standing() -> None:
    async def main() -> None:
        server = Server()
        server.status = 400
        async with server.up(), server.engine() as engine:
            with pytest.raises(Refused, match="as ordered"):
                await answer(engine, ASK)
            assert engine.stats().capacity == 1

    asyncio.run(main())


def test_trace_context_and_request_id_go_along() -> None:
    async def main() -> None:
        server = Server()
        server.chunks = whole("a")
        carried = {
            "traceparent": "00-1234567890abcdef1234567890abcdef-1234567890abcdef-01",
            "x-request-id": "o-7",
        }
        async with server.up(), server.engine() as engine:
            with Carrying(carried, ("r-1",)):
                await answer(engine, ASK)
            await answer(engine, GenerateRequest("r-2", "x", 1))
        assert server.headers[0]["traceparent"] == carried["traceparent"]
        assert [seen["x-request-id"] for seen in server.headers] == ["o-7", "r-2"]

    asyncio.run(main())


def test_a_start_that_failed_leaves_nothing_open() -> None:
    """An unclosed session is a warning, and so an error here."""

    async def main() -> None:
        server = Server()
        async with server.up():
            engine = make("other", {"base_url": f"http://127.0.0.1:{server.port}"})
            with pytest.raises(WeirError):
                await engine.start()
            await engine.close()
            with pytest.raises(RuntimeError):
                await answer(engine, ASK)

    asyncio.run(main())


def test_a_prompt_counted_in_the_end_stands_in_the_usage() -> None:
    """As of every server that doesn't tell token ids."""
    used = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":2}}\n\n'

    async def main() -> None:
        server = Server()
        server.chunks = [*whole("a", "b")[:-1], *_ends(used)]
        engine = make("m", {"base_url": f"http://127.0.0.1:{server.port}"})
        async with server.up(), running(engine) as it:
            for streamed in (False, True):
                body = {"model": "echo-1", "prompt": "x", "max_tokens": 2}
                if streamed:
                    chunks = await it.chunks(TEXT_PATH, body | {"stream_options": {"include_usage": True}})
                    usage = chunks[-1]["usage"]
                else:
                    usage = (await it.post(TEXT_PATH, body))[1]["usage"]
                assert (usage["prompt_tokens"], usage["completion_tokens"]) == (7, 2)
            await engine.close()

    asyncio.run(main())


def _ends(used: bytes) -> list[bytes | None]:
    return [
        b'data: {"choices":[{"index":0,"text":"","finish_reason":"length"}]}\n\n',
        used,
        b"data: [DONE]\n\n",
    ]
