"""The one place that talks to an OpenAI-compatible server.

Law: I/O and nothing decided: what to send is in request.py, what came is for answer.py and verdict.py.
Closing the iterator of `generate` closes the connection, which is how these servers hear that a client has
gone. The key is in a header and nowhere else: not in an error, not in a log.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from mesh.clock import Clock, SystemClock
from services.engine import GenerateRequest, Token
from services.faults import EngineFault, EngineHung
from services.telemetry.outgoing import outgoing_headers
from services.upstream import orca
from services.upstream.answer import Answer
from services.upstream.request import wire
from services.upstream.size import Ruler
from services.upstream.sse import BadStream, Events
from services.upstream.verdict import verdict

MAX_ERROR = 64 * 1024
"""Bytes of an error's body that are read."""
ERROR_S = 2.0
"""How long an error's body may take: its status says most of it."""
LINGER_S = 0.25
"""How long to wait for the end of a body whose last event has come: then the connection can be used again."""
FRESH_S = 10.0
"""A load report older than this tells nothing any more."""
OK = 200


class ConnectionLost(EngineFault):
    """No connection, or it broke: perhaps there is no server any more."""


@dataclass(frozen=True, slots=True)
class Target:
    """engine: name that tokens carry. base_url: without `/v1`. key: empty for none. model: as the server
    calls it. token_ids: the server can tell them. Seconds: connect_s until a connection stands; token_s
    between two pieces of an answer, and until its first one; ask_s for everything that is no answer of a
    model.
    """

    engine: str
    base_url: str
    key: str = field(default="", repr=False)
    model: str = ""
    token_ids: bool = False
    connect_s: float = 5.0
    token_s: float = 300.0
    ask_s: float = 10.0


class Upstream:
    """A client of one server; `close` it. `target` may be replaced while nothing runs. ruler: how long its
    prompts are, by what it has counted so far."""

    def __init__(self, target: Target, clock: Clock | None = None) -> None:
        self.target, self.ruler = target, Ruler()
        self._clock = clock or SystemClock()
        self._report: dict[str, float] = {}
        self._reported = 0.0
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    async def close(self) -> None:
        """Fine to call twice. Who asks afterwards gets ConnectionLost, not a session that nobody closes."""
        self._closed = True
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def load(self) -> Mapping[str, float]:
        """Named metrics of the load report that came last; empty where none came lately."""
        fresh = self._report and self._clock.monotonic() - self._reported < FRESH_S
        return self._report if fresh else {}

    def _http(self) -> aiohttp.ClientSession:
        if self._closed:
            raise ConnectionLost("the client is closed")
        if self._session is None:
            # How many run at once is for the scheduler in front to say, not for a pool of connections.
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), headers=_headers(self.target.key)
            )
        return self._session

    async def ask(self, method: str, path: str, *, limit_s: float = 0.0, **more: Any) -> str:
        """The body of an answer as text. limit_s: instead of ask_s. Raises EngineFault (see verdict.py)."""
        limit = aiohttp.ClientTimeout(total=limit_s or self.target.ask_s, connect=self.target.connect_s)
        async with self._faults(f"{method} {path}"):
            url = self.target.base_url + path
            sent = self._http().request(method, url, timeout=limit, allow_redirects=False, **more)
            async with sent as answer:
                if answer.status != OK:
                    raise verdict(answer.status, answer.headers, await _start_of(answer))
                return await answer.text(errors="replace")

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Token, None]:
        """Tokens as they come, the last one with why it ended. Raises EngineFault."""
        it = self.target
        path, body = wire(request, it.model, token_ids=it.token_ids)
        answer = Answer(it.engine, int(body.get("max_tokens", 0)))
        limit = aiohttp.ClientTimeout(total=None, sock_connect=it.connect_s, sock_read=it.token_s)
        headers = {"x-request-id": request.request_id, **outgoing_headers(request.request_id), **orca.ASK}
        async with self._faults(f"POST {path}", answer):
            url = it.base_url + path
            # Prompts and key go to the server that was named, and to none that it names.
            sent = self._http().post(url, json=body, timeout=limit, headers=headers, allow_redirects=False)
            async with sent as response:
                self._hear(response)
                if response.status != OK:
                    raise verdict(response.status, response.headers, await _start_of(response))
                events = Events()
                async for piece in response.content.iter_any():
                    for data in events.feed(piece):
                        for token in answer.event(data):
                            yield token
                    if answer.done:
                        break
                await _finish(response)
        last = answer.end()
        self.ruler.learn(request, answer.prompt_tokens)
        yield last

    def _hear(self, response: aiohttp.ClientResponse) -> None:
        if report := orca.named(response.headers):
            self._report, self._reported = report, self._clock.monotonic()

    @contextlib.asynccontextmanager
    async def _faults(self, what: str, answer: Answer | None = None) -> AsyncIterator[None]:
        """What can go wrong between us and a server, as faults."""
        try:
            yield
        except TimeoutError as error:
            raise EngineHung(f"{what}: the server said nothing in time{_after(answer)}") from error
        except BadStream as error:
            raise EngineFault(f"{what}: {error}{_after(answer)}") from error
        except EngineFault:
            raise
        except (aiohttp.ClientError, OSError, RuntimeError) as error:
            # RuntimeError: aiohttp's, for a body whose connection was closed from here.
            raise ConnectionLost(f"{what}: {_why(error)}{_after(answer)}") from error


def _after(answer: Answer | None) -> str:
    return f", after {answer.tokens} tokens" if answer is not None and answer.tokens else ""


def _why(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"no connection to the server ({error.strerror or error})"
    return f"the connection broke ({type(error).__name__}: {error})"


def _headers(key: str) -> Mapping[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


async def _start_of(response: aiohttp.ClientResponse) -> str:
    """Of the body, as far as it comes: one that breaks off or hangs is the same answer all the same."""
    body = b""
    with contextlib.suppress(TimeoutError, aiohttp.ClientError, RuntimeError):
        async with asyncio.timeout(ERROR_S):
            async for piece in response.content.iter_any():
                body += piece
                if len(body) >= MAX_ERROR:
                    break
    return body[:MAX_ERROR].decode("utf-8", "replace")


async def _finish(response: aiohttp.ClientResponse) -> None:
    """Read to the end of the body, so that the connection goes back to the pool. A server that keeps it open
    gets it closed."""
    with contextlib.suppress(TimeoutError, aiohttp.ClientError, RuntimeError):
        async with asyncio.timeout(LINGER_S):
            async for _ in response.content.iter_any():
                pass
