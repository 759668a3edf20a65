"""Torch engines for tests: started, and closed whatever happens.

Law: helpers only.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

from services.engine import Engine, GenerateRequest, Token
from services.engines.torch import make

PATIENCE_S = 60.0


@asynccontextmanager
async def started(folder: Path, **options: Any) -> AsyncGenerator[Any, None]:
    """An engine on the CPU with one thread: tiny models are slower with more."""
    given = {"device": "cpu", "threads": 1, "kv_tokens": 1024} | options
    engine = make(str(folder), {name: str(value) for name, value in given.items() if value is not None})
    engine.patience_s = 60.0  # a busy machine is no step that hangs
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()


class FirstStep:
    """In place of a core's `step`: one is made, and the others when `go` is set. It keeps no core alive."""

    def __init__(self, engine: Any) -> None:
        self._core, self._made, self.go = weakref.ref(engine._core), False, threading.Event()
        engine._core.step = self

    def __call__(self) -> Any:
        assert not self._made or self.go.wait(60)
        self._made = True
        core: Any = self._core()
        return type(core).step(core)


def request(ids: Sequence[int], count: int, **more: Any) -> GenerateRequest:
    return GenerateRequest("r", "", count, prompt_ids=tuple(ids), **more)


async def answer(engine: Engine, asked: GenerateRequest) -> list[Token]:
    async with aclosing(engine.generate(asked)) as made:
        return [token async for token in made]


async def ids_of(engine: Engine, asked: GenerateRequest) -> list[int]:
    return [token.token_id for token in await answer(engine, asked)]


async def text(engine: Engine, asked: GenerateRequest) -> str:
    return "".join([token.text for token in await answer(engine, asked)])


async def staggered(engine: Engine, asked: Sequence[GenerateRequest], after: int = 2) -> list[list[int]]:
    """All of them; each begins when the one before has made `after` tokens."""
    begun = [asyncio.Event() for _ in range(len(asked) + 1)]
    begun[0].set()

    async def one(index: int) -> list[int]:
        await begun[index].wait()
        found = []
        async for token in engine.generate(asked[index]):
            found.append(token.token_id)
            if len(found) >= after:
                begun[index + 1].set()
        begun[index + 1].set()
        return found

    return list(await asyncio.gather(*(one(index) for index in range(len(asked)))))


async def at_once(engine: Any, asked: Sequence[GenerateRequest]) -> list[list[int]]:
    """All of them; the worker finds them in one go, and so does the same steps each time."""
    go = threading.Event()
    engine._later(lambda: go.wait(60))
    made = [asyncio.create_task(ids_of(engine, one)) for one in asked]
    try:
        await until(lambda: engine.open == len(asked))
    finally:
        go.set()
    return list(await asyncio.gather(*made))


async def until(what: Callable[[], bool]) -> None:
    """Wait for it. Raises TimeoutError after PATIENCE_S."""
    async with asyncio.timeout(PATIENCE_S):
        while not what():  # noqa: ASYNC110 — the worker's thread has no event to tell
            await asyncio.sleep(0.001)


def at_zero(engine: Engine) -> bool:
    """Nothing runs, nothing waits, no KV is held."""
    stats = engine.stats()
    return (stats.running, stats.waiting, stats.kv_used) == (0, 0, 0.0)
