"""One HTTP exchange with a Consul agent, over py-consul's aiohttp client.

Law: the sole place where a request leaves this package. The token goes into a header and nowhere
else: not into a URL, not into a log, not into an error. py-consul's own callbacks drop headers and
bodies that we need (X-Consul-Index of leafs, reasons of 500s), so its transport is called with a
callback that hands the raw answer back.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import aiohttp
import consul.aio

from mesh.clock import Clock, SystemClock
from mesh.consul.answers import Answer
from mesh.consul.errors import BadRequest, ConsulError, TooMany, Unreachable, classify

PLAIN_TIMEOUT_S = 10.0
"""For calls that don't block. The agent itself holds a call to a leaderless datacenter for up to 7 s."""
BLOCKING_SLACK_S = 5.0
READ_TRIES = 3
READ_PAUSE_S = 0.05


@dataclass(frozen=True, slots=True)
class Tls:
    """How an https agent is checked and shown who we are. Paths of PEM files; empty means: not used."""

    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    verify: bool = True


@dataclass(frozen=True, slots=True)
class Raw:
    """An HTTP answer as it came."""

    status: int
    headers: Mapping[str, str]
    text: str = field(repr=False)


def client_timeout_s(wait_s: float | None) -> float:
    """Seconds to wait for an answer: Consul adds up to wait/16 of jitter to a blocking read."""
    if wait_s is None:
        return PLAIN_TIMEOUT_S
    return wait_s + wait_s / 16 + BLOCKING_SLACK_S


def _json(raw: Raw, what: str) -> Any:
    try:
        return json.loads(raw.text)
    except ValueError as error:
        raise ConsulError(
            raw.status, what, f"the answer is no JSON: {error}", "is this a Consul agent?"
        ) from None


class Transport:
    """Requests to one agent. An async context manager; `close` may be called twice.

    address: `http://host:port` or `https://host:port`. Raises BadRequest for any other.
    """

    def __init__(
        self,
        address: str,
        token: str = "",
        *,
        clock: Clock | None = None,
        rng: random.Random | None = None,
        tls: Tls | None = None,
    ) -> None:
        parts = urlsplit(address)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BadRequest(0, f"Consul address {address!r}", "not of the form http://host:port")
        self.address = f"{parts.scheme}://{parts.netloc}"
        self._host, self._scheme = parts.hostname, parts.scheme
        self._port = parts.port or (8501 if parts.scheme == "https" else 8500)
        self._headers = {"X-Consul-Token": token} if token else {}
        self._tls = tls or Tls()
        self.clock: Clock = clock or SystemClock()
        # Jitter of retries, no secret.
        self.rng = rng or random.Random()  # noqa: S311
        self._http: Any = None

    def exchange_headers(self) -> Mapping[str, str]:
        """Headers of every request. Holds the token: not for showing."""
        return self._headers

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.address!r})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections. A later call opens new ones."""
        http, self._http = self._http, None
        if http is not None:
            await http.close()

    async def get(
        self,
        path: str,
        params: Mapping[str, str] | None = None,
        index: int | None = None,
        wait_s: float | None = None,
    ) -> Answer:
        """Read JSON. With `index` and `wait_s` it blocks until the index has passed or the wait is over.

        Raises ConsulError. A read that doesn't block is tried again (three tries in all) when the
        connection broke or the agent answered 429; a blocking one never: its watch has its own pace.
        404 is an Answer with body None when Consul itself said so (the index header proves it).
        """
        raw = await self._read(path, params or {}, index, wait_s)
        body = None if raw.status == 404 else _json(raw, f"GET {path} at {self.address}")
        return Answer(
            index=int(raw.headers.get("X-Consul-Index", 0)),
            body=body,
            known_leader=raw.headers.get("X-Consul-KnownLeader", "true") == "true",
            last_contact_ms=int(raw.headers.get("X-Consul-LastContact", 0)),
        )

    async def _read(
        self, path: str, params: Mapping[str, str], index: int | None, wait_s: float | None
    ) -> Raw:
        query = dict(params)
        if index is not None:
            query["index"] = str(index)
        if index == 0:
            # A watch that starts over, perhaps because the server did: newly elected, it answers other reads
            # from a store that its log isn't applied to yet, and all that was there looks gone.
            query["consistent"] = ""
        if wait_s is not None:
            query["wait"] = f"{max(1, round(wait_s * 1000))}ms"
        blocking = bool(index) and wait_s is not None
        for attempt in range(1, READ_TRIES + 1):
            try:
                raw = await self.exchange("GET", path, query, timeout_s=client_timeout_s(wait_s))
                if raw.status == 404 and "X-Consul-Index" not in raw.headers:
                    raise classify(404, f"GET {path} at {self.address}", raw.text)
                return raw
            except (TooMany, Unreachable):
                if blocking or attempt == READ_TRIES:
                    raise
                await self.clock.sleep(READ_PAUSE_S * attempt * (1 + self.rng.random()))
        raise AssertionError("unreachable: the loop returns or raises")

    async def exchange(
        self,
        method: str,
        path: str,
        params: Mapping[str, str] | None = None,
        data: bytes | str = b"",
        *,
        timeout_s: float = PLAIN_TIMEOUT_S,
        accept: tuple[int, ...] = (200, 404),
    ) -> Raw:
        """One request, tried once. Raises ConsulError for no answer and for a status not in `accept`."""
        what = f"{method} {path} at {self.address}"
        call = getattr(self._client(), method.lower())
        body: dict[str, Any] = {} if method in ("GET", "DELETE") else {"data": data}
        try:
            answer = await call(
                lambda response: response,
                path,
                params=list((params or {}).items()),
                headers=self._headers,
                connections_timeout=timeout_s,
                **body,
            )
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise self._no_answer(what, error, timeout_s) from error
        raw = Raw(answer.code, answer.headers, answer.body)
        if raw.status not in accept:
            raise classify(raw.status, what, raw.text)
        return raw

    def _client(self) -> Any:
        # Made on first use: aiohttp wants the running loop. TLS settings are only loaded for https,
        # since reading the system's certificates costs some 20 ms.
        if self._http is None:
            tls, secure = self._tls, self._scheme == "https"
            cert = (tls.cert_file, tls.key_file or tls.cert_file) if tls.cert_file else None
            self._http = consul.aio.HTTPClient(
                self._host,
                self._port,
                self._scheme,
                verify=(tls.ca_file or tls.verify) if secure and tls.verify else False,
                cert=cert if secure else None,
            )
        return self._http

    @staticmethod
    def _no_answer(what: str, error: BaseException, timeout_s: float) -> ConsulError:
        if isinstance(error, TimeoutError):
            why = f"no answer within {timeout_s:g} s"
        else:
            why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return Unreachable(0, what, why, "check that the agent runs at this address (CONSUL_HTTP_ADDR)")
