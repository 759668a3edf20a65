"""An Engine whose inside can be closed and built anew, elsewhere too, while all else keeps hold of it.

Law: forwards; decides nothing. Between closing and the next start it refuses requests (503) and its stats are
empty, so that nobody needs to know that the engine is another one now.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable

from services.devices.door import ANYWHERE, Binding
from services.engine import Engine, EngineFacts, EngineStats, GenerateRequest, Token
from services.faults import Refused

Build = Callable[[Binding], Engine]
"""Makes the whole stack of engines (not started) for this place."""

EMPTY = EngineStats()


class Renewable:
    """An Engine. build: called now (facts are asked for early) and again by `renew`."""

    def __init__(self, build: Build, binding: Binding = ANYWHERE) -> None:
        self._build, self.binding = build, binding
        self._engine = build(binding)
        self.open = True
        self.renewals = 0

    @property
    def inner(self) -> Engine:
        return self._engine

    async def start(self) -> None:
        await self._engine.start()

    def facts(self) -> EngineFacts:
        return self._engine.facts()

    def size(self, request: GenerateRequest) -> int:
        self._check()
        return self._engine.size(request)

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Token, None]:
        self._check()
        return self._engine.generate(request)

    async def sleep(self, level: int = 1) -> None:
        self._check()
        await self._engine.sleep(level)

    async def wake(self) -> None:
        self._check()
        await self._engine.wake()

    def stats(self) -> EngineStats:
        return self._engine.stats() if self.open else EMPTY

    def upstream_metrics(self) -> str:
        """Metrics of a server behind the engine (Prometheus' text form), "" where there is none."""
        tell = getattr(self._engine, "upstream_metrics", None)
        return tell() if tell is not None and self.open else ""

    async def close(self) -> None:
        """Its facts stay as they were; `renew` brings it back."""
        self.open = False
        await self._engine.close()

    async def renew(self, binding: Binding | None = None, build: Build | None = None) -> None:
        """Close what is there (unless that was tried already), build and start what replaces it. build: how,
        if not as the first time. Raises what building or starting raises, and then stays closed."""
        if self.open:
            await self.close()
        where = self.binding if binding is None else binding
        fresh = (build or self._build)(where)
        try:
            await fresh.start()
        except BaseException:
            await fresh.close()
            raise
        self._engine, self.binding, self.open = fresh, where, True
        self.renewals += 1

    def _check(self) -> None:
        if not self.open:
            raise Refused(503, "engine_closed", "the engine is closed: the instance sleeps or starts anew")
