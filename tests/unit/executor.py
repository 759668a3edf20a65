"""An executor's server in the test's own process, with a client: `served(test, engine=…)`.

Law: whatever is started here ends with the test.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from random import Random
from typing import Any

import aiohttp

from mesh.clock import Clock, SystemClock
from services.engines.echo import EchoEngine, EchoOptions
from services.instance import Identity, Instance
from services.listener import Listener
from services.server import Edge, Server
from tests.sse import events
from tests.virtual import run_leaping

WHO = Identity("chat", "chat-canary-1", "westeurope", "z1", "canary", "7", "echo-1")
CHAT = {"model": "echo-1", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "seed": 9}
TEXT = {"model": "echo-1", "prompt": "hi", "max_tokens": 5, "seed": 0}
CHAT_PATH, TEXT_PATH = "/v1/chat/completions", "/v1/completions"
DEADLINE_S = 60.0


class Running:
    """An executor in this process, with a client for it. `last`: headers of the last answer to `post`."""

    def __init__(self, instance: Instance, server: Server, http: aiohttp.ClientSession, base: str) -> None:
        self.instance, self.server, self.http, self.base = instance, server, http, base
        self.last: Mapping[str, str] = {}

    async def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> tuple[int, Any]:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.http.post(self.base + path, data=io.BytesIO(raw), headers=headers) as answer:
            assert answer.content_type == "application/json"
            self.last = answer.headers
            return answer.status, await answer.json()

    async def stream(
        self, path: str, body: dict[str, Any], headers: Mapping[str, str] | None = None
    ) -> list[str]:
        asked = body | {"stream": True}
        async with self.http.post(self.base + path, json=asked, headers=headers) as answer:
            assert (answer.status, answer.content_type) == (200, "text/event-stream")
            self.last = answer.headers
            return events(await answer.read())

    async def chunks(self, path: str, body: dict[str, Any]) -> list[Any]:
        """Events of a whole stream, parsed, without [DONE]."""
        *parts, done = await self.stream(path, body)
        assert done == "[DONE]"
        return [json.loads(part) for part in parts]

    async def cut(
        self,
        path: str,
        body: dict[str, Any],
        headers: Mapping[str, str] | None = None,
        then: Callable[[bytes], object] = len,
    ) -> list[Any]:
        """Events of a stream that ends without a proper end, parsed. then: called with all that came,
        whenever something came."""
        seen, proper = b"", True
        try:
            async with self.http.post(
                self.base + path, json=body | {"stream": True}, headers=headers
            ) as answer:
                assert answer.status == 200
                async for part in answer.content.iter_any():
                    seen += part
                    then(seen)
        except aiohttp.ClientPayloadError:
            proper = False
        assert not proper, "the stream came to a proper end"
        return [json.loads(one) for one in events(seen)]

    async def read(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> bytes:
        """Whatever comes."""
        async with self.http.post(self.base + path, json=body, headers=headers) as answer:
            return await answer.read()

    async def status(self, path: str) -> int:
        async with self.http.get(self.base + path) as answer:
            return answer.status

    async def metrics(self) -> str:
        async with self.http.get(self.base + "/metrics") as answer:
            return await answer.text()

    def sample(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples with these labels."""
        return sum(
            sample.value
            for family in self.instance.registry.collect()
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not true():  # noqa: ASYNC110 (what is waited for has no event)
                await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def running(
    engine: Any = None,
    *,
    debug: bool = False,
    edge: Edge | None = None,
    clock: Clock | None = None,
    **options: float,
) -> AsyncIterator[Running]:
    """options: of the echo engine, where none is given. Chance is seeded."""
    made = engine or EchoEngine(EchoOptions(**options))  # type: ignore[arg-type]
    await made.start()
    instance = Instance(WHO, made)
    server = Server(instance, clock or SystemClock(), debug=debug, edge=edge or Edge(chance=Random(1)))
    listener = Listener(server.app(), "127.0.0.1", 0)
    await listener.start()
    try:
        async with aiohttp.ClientSession() as http:
            yield Running(instance, server, http, f"http://127.0.0.1:{listener.port}")
    finally:
        await listener.stop()
        await made.close()


def served(
    test: Callable[[Running], Awaitable[None]],
    *,
    debug: bool = False,
    engine: Any = None,
    edge: Edge | None = None,
    **options: float,
) -> None:
    """Run `test` against a server, with a clock that `leap` puts forward; afterwards nothing may be
    in flight, unless the engine hangs on order."""

    async def main() -> None:
        async with running(engine, debug=debug, edge=edge, **options) as it:
            await test(it)
            if options.get("hang_after", -1) < 0:
                await it.until(lambda: it.instance.in_flight == 0)

    run_leaping(main())
