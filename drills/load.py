"""Open-loop load: requests go out at times fixed up front, whatever the answers do; every one is recorded.

Law: sends and records, never judges. Latency counts from the time a request was due, so that a stalled mesh
(or a stalled generator) can't hide behind requests that were never sent ("coordinated omission").
Bounded by construction: rate x duration requests, each with a deadline.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import aiohttp

from drills.load_gate import Gate
from mesh.clock import Clock, SystemClock
from mesh.xds.names import METADATA_HEADER

ATTEMPTS_HEADER = "x-envoy-attempt-count"
DONE = b"[DONE]"
KEEP_ALIVE_S = 3600.0
_KEEP = 64
"""Bytes of a stream's end that are kept, to look for its proper close."""


@dataclass(frozen=True, slots=True)
class Request:
    """What to send. body None means GET. stream: an SSE answer that must end with `data: [DONE]`."""

    path: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    stream: bool = False
    session: str = ""


@dataclass(frozen=True, slots=True)
class Sample:
    """One request as its client saw it. Times are unix seconds; first_byte_s and end_s 0 when there was none.

    ok: complete and below 400. cut: an answer that began and did not end properly. region, stage: who
    answered, from the dye header. attempts: Envoy's count, 0 = not told. error: kind of failure, "" if none.
    """

    index: int
    url: str
    due_s: float
    sent_s: float
    first_byte_s: float
    end_s: float
    status: int
    ok: bool
    cut: bool = False
    region: str = ""
    stage: str = ""
    session: str = ""
    stream: bool = False
    attempts: int = 0
    error: str = ""

    @property
    def latency_s(self) -> float:
        return self.end_s - self.due_s


def dye(header: str) -> tuple[str, str]:
    """(region, stage) of `region=…;stage=…`; empty strings for what is missing."""
    parts = dict(part.partition("=")[::2] for part in header.split(";"))
    return parts.get("region", ""), parts.get("stage", "")


async def open_loop(  # noqa: PLR0913 - all but three are named and have a default
    urls: Sequence[str],
    rate: float,
    duration_s: float,
    *,
    ca_file: Path | str | None,
    make_request: Callable[[int], Request],
    on_sample: Callable[[Sample], None] | None = None,
    stop: asyncio.Event | None = None,
    timeout_s: float = 30.0,
    clock: Clock | None = None,
) -> list[Sample]:
    """Send `rate` requests per second for `duration_s`, to the base `urls` in turn; wait for every answer.

    timeout_s: deadline of one request. `stop` ends the sending early; what is under way is still awaited.
    Raises ValueError without a url or a positive rate; what `make_request` or `on_sample` raises comes as an
    ExceptionGroup after the requests under way were cancelled.
    """
    if not urls or rate <= 0:
        raise ValueError(f"load needs a url and a rate > 0, not {list(urls)} and {rate}")
    clock = clock or SystemClock()
    samples: list[Sample] = []

    def record(sample: Sample) -> None:
        samples.append(sample)
        if on_sample is not None:
            on_sample(sample)

    async with AsyncExitStack() as stack:
        senders = [await _sender(stack, url, ca_file, timeout_s, clock) for url in urls]
        # The group waits for every answer, and leaves no request behind when the caller is cancelled.
        async with asyncio.TaskGroup() as group:
            start = clock.monotonic()
            for index in range(round(rate * duration_s)):
                due = start + index / rate
                if (wait := due - clock.monotonic()) > 0:
                    await clock.sleep(wait)
                if stop is not None and stop.is_set():
                    break
                sender = senders[index % len(senders)]
                group.create_task(sender.send(index, make_request(index), due, record))
    return sorted(samples, key=lambda s: s.index)


async def _sender(
    stack: AsyncExitStack, url: str, ca_file: Path | str | None, timeout_s: float, clock: Clock
) -> _Sender:
    tls: ssl.SSLContext | bool = ssl.create_default_context(cafile=str(ca_file)) if ca_file else True
    trace = aiohttp.TraceConfig()
    trace.on_connection_create_end.append(_connected)
    session = aiohttp.ClientSession(
        # The gate counts on it that an idle connection stays: servers close them, we don't.
        connector=aiohttp.TCPConnector(limit=0, ssl=tls, keepalive_timeout=KEEP_ALIVE_S),
        timeout=aiohttp.ClientTimeout(total=None),
        trace_configs=[trace],
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
    )
    return _Sender(url.rstrip("/"), await stack.enter_async_context(session), clock, timeout_s)


async def _connected(
    _: aiohttp.ClientSession, context: SimpleNamespace, __: aiohttp.TraceConnectionCreateEndParams
) -> None:
    context.trace_request_ctx.connected()


class _Answer:
    """What came back so far."""

    def __init__(self) -> None:
        self.status, self.first, self.tail = 0, 0.0, b""
        self.headers: Mapping[str, str] = {}


class _Sender:
    """Requests to one base URL over keep-alive connections."""

    def __init__(self, url: str, session: aiohttp.ClientSession, clock: Clock, timeout_s: float) -> None:
        self._url, self._session, self._clock, self._timeout_s = url, session, clock, timeout_s
        self._gate = Gate()
        self._offset = clock.time() - clock.monotonic()

    async def send(self, index: int, request: Request, due: float, record: Callable[[Sample], None]) -> None:
        sent, answer, error = self._clock.monotonic(), _Answer(), ""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._exchange(request, answer)
        except TimeoutError:
            error = "timeout"
        except (aiohttp.ClientError, OSError) as failure:
            error = type(failure).__name__
        record(self._sample(index, request, due, sent, answer, error))

    async def _exchange(self, request: Request, answer: _Answer) -> None:
        ticket, reusable = await self._gate.enter(), False
        try:
            async with self._session.request(
                "GET" if request.body is None else "POST",
                self._url + request.path,
                data=request.body,
                headers=request.headers,
                allow_redirects=False,  # one request, one record
                trace_request_ctx=ticket,
            ) as response:
                answer.status, answer.headers = response.status, response.headers
                async for chunk in response.content.iter_any():
                    answer.first = answer.first or self._clock.monotonic()
                    answer.tail = (answer.tail + chunk)[-_KEEP:]
            reusable = answer.headers.get("Connection", "").lower() != "close"
        finally:
            ticket.leave(reusable=reusable)

    def _sample(
        self, index: int, request: Request, due: float, sent: float, answer: _Answer, error: str
    ) -> Sample:
        whole = not error and (not request.stream or answer.status >= 400 or DONE in answer.tail)
        if not whole and not error:
            error = "stream ended without [DONE]"
        region, stage = dye(answer.headers.get(METADATA_HEADER, ""))
        attempts = answer.headers.get(ATTEMPTS_HEADER, "0")
        return Sample(
            index=index,
            url=self._url,
            due_s=due + self._offset,
            sent_s=sent + self._offset,
            first_byte_s=answer.first + self._offset if answer.first else 0.0,
            end_s=self._clock.monotonic() + self._offset,
            status=answer.status,
            ok=whole and answer.status < 400,
            cut=not whole and 0 < answer.status < 400,
            region=region,
            stage=stage,
            session=request.session,
            stream=request.stream,
            attempts=int(attempts) if attempts.isdigit() else 0,
            error=error or (f"HTTP {answer.status}" if answer.status >= 400 else ""),
        )
