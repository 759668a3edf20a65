"""The openai engine and a server that keeps to nothing: bytes as the test wrote them, to half a header."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from services.batching import Scheduled
from services.engine import EngineFacts, GenerateRequest
from services.engines.openai import make
from services.fallback.engine import FallbackEngine
from services.faults import EngineFault, EngineHung, Refused
from services.upstream import client
from services.upstream.client import ConnectionLost
from tests.contract.engine_suite import answer, until
from tests.unit.executor import CHAT, CHAT_PATH, TEXT, TEXT_PATH, running
from tests.unit.scripted import Scripted
from tests.virtual import leap, run_leaping

pytestmark = pytest.mark.real
ASK = GenerateRequest("r-1", "hello", 4)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
WHOLE = HEAD + b"Connection: close\r\n\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
HANG = b""
"""Among the pieces: nothing comes any more, and the connection stays."""


def event(**body: Any) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def token(text: str, finish: str | None = None) -> bytes:
    return event(choices=[{"index": 0, "text": text, "delta": {"content": text}, "finish_reason": finish}])


END = token("", "stop") + b"data: [DONE]\n\n"


class Raw:
    """A server of one model. Every POST gets `pieces`, then the end of the connection. asked: heads and
    bodies of what came. gone: a client left while it was kept waiting."""

    def __init__(self, pieces: Sequence[bytes], **model: Any) -> None:
        self.pieces, self.model = pieces, {"id": "echo-1", **model}
        self.asked: list[tuple[str, Any]] = []
        self.waiting, self.gone = asyncio.Event(), asyncio.Event()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError), contextlib.closing(writer):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            if head.startswith("get"):
                body = json.dumps({"data": [self.model]})
                head = f"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
                writer.write((head + body).encode())
                return
            size = int(head.split("content-length: ")[1].split("\r\n")[0])
            self.asked.append((head, json.loads(await reader.readexactly(size))))
            for piece in self.pieces:
                if piece == HANG:
                    self.waiting.set()
                    await reader.read()
                    self.gone.set()
                    return
                writer.write(piece)
                await asyncio.sleep(0)  # else the kernel would make one piece of two

    @contextlib.asynccontextmanager
    async def engine(self, **options: str) -> AsyncIterator[Any]:
        async with await asyncio.start_server(self._serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            it = make("echo-1", {"base_url": f"http://127.0.0.1:{port}", "start_s": "20"} | options)
            try:
                await it.start()
                yield it
            finally:
                await it.close()


@pytest.mark.parametrize(
    ("pieces", "says"),
    [
        ([], "connection broke"),
        ([b"HTTP/1.1 200 OK\r\nContent-Ty"], "connection broke"),
        ([b"SSH-2.0-OpenSSH_9.2\r\n\r\n"], "connection broke"),
        ([b"HTTP/1.1 307 No\r\nLocation: /v1/completions\r\nContent-Length: 0\r\n\r\n"], "answered 307"),
        ([CHUNKED], "connection broke"),
        ([CHUNKED, b"5\r\nda"], "connection broke"),
        ([HEAD + b"Content-Length: 999\r\n\r\n", token("a")], "connection broke.*after 1 tokens"),
        ([WHOLE], "broke off after 0 tokens"),
        ([WHOLE, token("a") + b"data: [DONE]\n\n"], "broke off after 1 tokens"),
        ([WHOLE, token("a"), b'data: {"choices": [{"index": 0, "te'], "broke off after 1 tokens"),
        ([WHOLE, token("a"), event(error={"message": "out of cheese", "code": 500}), END], "out of cheese"),
        ([WHOLE, event(choices=["odd"]), END], "no answer"),
    ],
)
def test_what_ends_too_early_or_badly_is_a_fault_and_never_an_answer(pieces: list[bytes], says: str) -> None:
    async def main() -> None:
        async with Raw(pieces).engine() as engine:
            with pytest.raises(EngineFault, match=says) as caught:
                await answer(engine, ASK)
            assert not isinstance(caught.value, Refused)
            assert not engine.stats().running
            await until("it has been asked whether it lives", lambda: engine.stats().capacity == 1)

    run_leaping(main())


@pytest.mark.parametrize("pieces", [[HANG], [b"HTTP/1.1 200 OK\r\nContent-Ty", HANG], [CHUNKED, HANG]])
def test_a_client_gone_before_the_first_byte_is_told_to_the_server(pieces: list[bytes]) -> None:
    async def main() -> None:
        server = Raw(pieces)
        async with server.engine() as engine:
            asking = asyncio.create_task(answer(engine, ASK))
            await server.waiting.wait()
            asking.cancel()
            await asyncio.wait((asking,))
            async with asyncio.timeout(30):
                await server.gone.wait()
            now = engine.stats()
            assert (now.running, now.capacity) == (0, 1), "the server did nothing wrong"

    run_leaping(main())


def test_half_a_header_and_then_silence_is_a_hang() -> None:
    async def main() -> None:
        server = Raw([b"HTTP/1.1 200 OK\r\nContent-Ty", HANG])
        async with server.engine(token_s="60") as engine:
            asking = asyncio.create_task(answer(engine, ASK))
            await server.waiting.wait()
            leap(61)
            with pytest.raises(EngineHung):
                await asking

    run_leaping(main())


def test_a_stream_whose_engine_is_closed_broke_and_is_no_riddle() -> None:
    async def main() -> None:
        async with Raw([WHOLE, token("a"), HANG]).engine() as engine:
            made = engine.generate(ASK)
            await anext(made)
            await engine.close()
            with pytest.raises(EngineFault, match="after 1 tokens"):
                await anext(made)
            # aiohttp says it in two ways, by the moment at which the connection went.
            with pytest.raises(ConnectionLost):
                async with engine._client._faults(""):
                    raise RuntimeError("Connection closed.")

    run_leaping(main())


def test_what_the_server_counts_is_learnt() -> None:
    used = event(choices=[], usage={"prompt_tokens": 500, "completion_tokens": 1})
    asked = GenerateRequest("r-1", "x" * 1000, 4)

    async def main() -> None:
        async with Raw([WHOLE, token("a"), token("", "stop"), used, b"data: [DONE]\n\n"]).engine() as engine:
            before = engine.size(asked)
            assert (await answer(engine, asked))[-1].prompt_tokens == 500
            assert before == 250 < engine.size(asked) < 500

    run_leaping(main())


def test_events_in_pieces_of_any_size_without_usage_are_the_answer() -> None:
    body = token("wasser ") + token("ström") + END

    async def main() -> None:
        for size in (1, 3, 50):
            pieces = [WHOLE, *(body[at : at + size] for at in range(0, len(body), size))]
            async with Raw(pieces).engine() as engine:
                tokens = await answer(engine, ASK)
                assert "".join(one.text for one in tokens) == "wasser ström"
                assert tokens[-1].prompt_tokens == 0, "nobody told"

    run_leaping(main())


def test_a_refusal_in_the_stream_is_the_client_s_and_the_server_is_well() -> None:
    refusal = event(error={"message": "too long", "code": 400, "param": {"odd": 1}})

    async def main() -> None:
        async with Raw([WHOLE, refusal]).engine() as engine:
            with pytest.raises(Refused, match="too long") as caught:
                await answer(engine, ASK)
            assert (caught.value.status, caught.value.param) == (400, None)
            assert engine.stats().capacity == 1

    run_leaping(main())


BUSY = b"HTTP/1.1 429 Busy\r\nRetry-After: 7\r\nContent-Length: 54\r\n\r\n"
SAID = b'{"error": {"message": "slow down", "code": "kv_full"}}'


@pytest.mark.parametrize(
    ("pieces", "code"),
    [
        ([BUSY + SAID[:9], SAID[9:30], SAID[30:]], "kv_full"),
        ([BUSY + SAID[:9]], "rate_limited"),
        ([BUSY + SAID[:9], HANG], "rate_limited"),
    ],
)
def test_a_refusal_whose_body_comes_in_pieces_or_not_at_all_is_one(
    pieces: list[bytes], code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(SAID) == 54
    # No time for the one that never comes, all of it for the others.
    monkeypatch.setattr(client, "ERROR_S", 0.0 if HANG in pieces else 60.0)

    async def main() -> None:
        server = Raw(pieces)
        async with server.engine() as engine:
            with pytest.raises(Refused) as caught:
                await answer(engine, ASK)
            assert (caught.value.status, caught.value.code, caught.value.retry_after_s) == (429, code, 7)

    run_leaping(main())


# -- what is asked and what is told


@pytest.mark.parametrize("context", [0, 4096])
def test_a_chat_of_no_length_is_asked_as_such_and_cut_by_nobody_here(context: int) -> None:
    """Longer than what the door puts aside for it."""
    tokens = 300
    pieces = [WHOLE, *(token("a") for _ in range(tokens)), END]

    async def main() -> None:
        server = Raw(pieces, max_model_len=context or None)
        async with server.engine() as engine:
            plain = {"messages": CHAT["messages"]}
            async with running(Scheduled(_Started(engine))) as it:
                status, said = await it.post(CHAT_PATH, plain)
                assert (status, said["usage"]["completion_tokens"]) == (200, tokens + 1)
                await it.post(CHAT_PATH, plain | {"max_tokens": 7})
                await it.post(TEXT_PATH, {"prompt": "hi"})
        assert [body.get("max_tokens") for _, body in server.asked] == [None, 7, 16]

    run_leaping(main())


def test_a_load_report_is_asked_for_and_its_named_metrics_go_on_to_our_client() -> None:
    report = b"endpoint-load-metrics: TEXT cpu_utilization=0.9, named_metrics.spice=0.25, "
    report += b"named_metrics.kv_cache_usage_perc=0.75, named_metrics.queue=99\r\n"
    pieces = [HEAD + report + b"Connection: close\r\n\r\n", token("a") + END]

    async def main() -> None:
        server = Raw(pieces)
        async with server.engine() as engine, running(Scheduled(_Started(engine))) as it:
            await it.post(TEXT_PATH, TEXT)
            told = it.last["endpoint-load-metrics"]
            assert "named_metrics.spice=0.25" in told
            assert "named_metrics.kv_cache_usage_perc=0.75" in told, "we have no cache of our own here"
            assert "application_utilization=0.75" in told
            assert "named_metrics.queue=0," in told, "ours is newer"
        assert "endpoint-load-metrics-format: text" in server.asked[0][0]

    run_leaping(main())


def test_a_long_text_is_a_long_sequence_also_where_the_server_alone_can_count() -> None:
    """S14's first rule; and ids that are as long."""
    second = Scripted(["b"], facts=EngineFacts("second", "echo-1"))

    async def main() -> None:
        server = Raw([WHOLE, token("a") + END], max_model_len=32_768)
        async with server.engine() as engine:
            both = FallbackEngine(Scheduled(_Started(engine)), second)
            async with running(both) as it:
                for prompt in ("water " * 12_000, [1] * 9000, "water"):
                    assert (await it.post(TEXT_PATH, TEXT | {"prompt": prompt}))[0] == 200
                    why = it.last.get("x-weir-fallback", "")
                    assert why == ("" if prompt == "water" else "sequence_length")
        assert len(server.asked) == 1

    run_leaping(main())


class _Started:
    """The engine, started already."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def start(self) -> None:
        """It is."""
