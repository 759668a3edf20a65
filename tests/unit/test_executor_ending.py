"""How a server ends what it has begun: with a word to each client, and never held up by one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from random import Random
from typing import Any

import pytest
from aiohttp import web

from services import answer
from services.answer_settings import AnswerSettings
from services.server import Edge
from tests.unit.executor import CHAT, CHAT_PATH, TEXT, TEXT_PATH, Running, served
from tests.unit.scripted import HANG, Scripted
from tests.virtual import leap

OVER = (503, "shutting_down")
BIG = "x" * 8_000_000
"""More than a socket takes that nobody reads from."""


@pytest.mark.parametrize(("path", "body"), [(TEXT_PATH, TEXT), (CHAT_PATH, CHAT | {"n": 2})])
def test_whoever_is_under_way_is_told_and_whoever_still_comes_is_refused(
    path: str, body: dict[str, Any]
) -> None:
    engine = Scripted(["a", "b", HANG])

    async def test(it: Running) -> None:
        n = body.get("n", 1)
        each = 2 * n  # a and b
        came = [b""]
        stream = asyncio.create_task(it.cut(path, body, then=came.append))
        whole = asyncio.create_task(it.post(path, body))
        # A token is counted before it is written: what the client has is what counts here.
        await it.until(lambda: came[-1].count(b"\n\n") == each)
        await it.until(lambda: it.sample("weir_executor_tokens_total") == 2 * each)
        await it.server.end()
        *tokens, last = await stream
        assert (len(tokens), last["error"]["code"]) == (each, "shutting_down")
        status, said = await whole
        assert (status, said["error"]["code"], it.last["retry-after"]) == (*OVER, "1")
        assert engine.running == it.instance.in_flight == 0
        assert it.sample("weir_executor_streams_cut_total") == 1
        status, said = await it.post(path, body)
        assert (status, said["error"]["code"]) == OVER
        assert len(engine.seen) == 2 * n, "no engine is asked any more"
        await it.server.end()  # again

    served(test, engine=engine)


def test_a_stream_without_its_first_token_is_refused_like_any_answer() -> None:
    engine = Scripted([HANG])

    async def test(it: Running) -> None:
        stream = asyncio.create_task(it.post(TEXT_PATH, TEXT | {"stream": True}))
        await it.until(lambda: engine.running == 1)
        await it.server.end()
        status, said = await stream
        assert (status, said["error"]["code"]) == OVER

    served(test, engine=engine)


@contextlib.asynccontextmanager
async def stuck(it: Running, late: bytes = b"") -> AsyncIterator[tuple[socket.socket, asyncio.Transport]]:
    """A client that has asked for a stream and doesn't read it, and the server's side of its connection."""
    lines: list[Any] = []
    prepare = web.StreamResponse.prepare

    async def seen(self: web.StreamResponse, request: Any) -> Any:
        lines.append(request.transport)
        return await prepare(self, request)

    host, _, port = it.base.removeprefix("http://").partition(":")
    raw = json.dumps(TEXT | {"stream": True}).encode()
    with socket.socket() as line, pytest.MonkeyPatch.context() as patch:
        patch.setattr(web.StreamResponse, "prepare", seen)
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        line.connect((host, int(port)))
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + late
        line.sendall(head + b"Content-Length: %d\r\n\r\n" % len(raw) + raw)
        await it.until(lambda: bool(lines) and lines[0].get_write_buffer_size() > 0)
        yield line, lines[0]


@pytest.mark.parametrize("ended_by", ["us", "its deadline"])
def test_a_client_that_does_not_read_holds_nobody_up(ended_by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer, "LAST_WORDS_S", 0.05)
    engine = Scripted([BIG, HANG])
    late = b"x-weir-deadline-ms: 60000\r\n" if ended_by == "its deadline" else b""

    async def test(it: Running) -> None:
        async with stuck(it, late) as (_, line):
            if ended_by == "us":
                await it.server.end()
            else:
                leap(60)
            await it.until(lambda: it.instance.in_flight == 0 and not line.get_write_buffer_size())
            assert engine.running == 0
            assert it.sample("weir_executor_streams_cut_total") == 1

    served(test, engine=engine)


def test_a_client_that_reads_nothing_is_cut_after_the_limit_and_one_that_reads_a_little_is_not() -> None:
    engine = Scripted([BIG, HANG])

    async def test(it: Running) -> None:
        async with stuck(it) as (client, line):
            for _ in range(2):
                left = line.get_write_buffer_size()
                while line.get_write_buffer_size() >= left:
                    assert await asyncio.to_thread(client.recv, 1 << 20)
                leap(20)
                assert await it.status("/health") == 200  # the loop has been round with the time as it is
                assert engine.running == 1
            leap(20)
            await it.until(lambda: it.instance.in_flight == 0)
            assert engine.running == line.get_write_buffer_size() == 0
            assert it.sample("weir_executor_requests_total", code="499") == 1

            def rest() -> bytes:
                return b"".join(iter(lambda: client.recv(1 << 20), b""))

            with contextlib.suppress(ConnectionResetError):
                assert not (await asyncio.to_thread(rest)).endswith(b"0\r\n\r\n")

    served(test, engine=engine, edge=Edge(chance=Random(1), answers=AnswerSettings(20)))


def test_a_client_that_reads_late_is_told_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer, "LAST_WORDS_S", 30.0)

    async def test(it: Running) -> None:
        async with stuck(it) as (client, _):
            ending = asyncio.create_task(it.server.end())
            await it.until(lambda: it.sample("weir_executor_streams_cut_total") == 1)

            def rest() -> bytes:
                return b"".join(iter(lambda: client.recv(1 << 20), b""))

            said = await asyncio.to_thread(rest)
            assert b'"code":"shutting_down"' in said[-200:]
            await ending

    served(test, engine=Scripted([BIG, HANG]))
