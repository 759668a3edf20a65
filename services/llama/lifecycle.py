"""What both torch engines share: start, size, generate, sleep, wake, close around a core in a worker thread.

Law: keeps the order of an engine's life; decides nothing about steps. What blocks (loading, parking, steps)
runs in the worker's thread, never in the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable
from typing import TypeVar

import torch

from services.engine import EngineFacts, EngineStats, GenerateRequest, Token
from services.faults import EngineDied
from services.llama.core import Core
from services.llama.intake import Intake
from services.llama.model import Model
from services.llama.serving import Serving

log = logging.getLogger("weir.torch")
T = TypeVar("T")


class LlamaEngine(ABC):
    """An Engine (services/engine.py). name: of the engine, on every token."""

    name = ""
    patience_s = 5.0
    """How long `close` waits for a step to end."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._serving: Serving | None = None
        self._intake: Intake | None = None
        self._started = self._asleep = False

    async def start(self) -> None:
        """Raises WeirError for what is missing or broken; RuntimeError a second time."""
        if self._started:
            raise RuntimeError("the engine runs already")
        self._started = True
        self._serving = Serving(self.name)
        self.model.join(self)
        await self._call(self._begin)
        context = min(self.model.context, self._room())
        config = self.model.config
        self._intake = Intake(self.model.tokenizer, config.vocabulary, context, self.model.settings.seed)

    @property
    def open(self) -> int:
        """Requests under way."""
        return self._serving.open if self._serving is not None else 0

    def size(self, request: GenerateRequest) -> int:
        """Prompt tokens. Raises Refused (400)."""
        return len(self._ready().ids(request))

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Token, None]:
        """Tokens of one sequence. Raises Refused (400), the faults of services/faults.py, and RuntimeError
        while asleep or not started."""
        intake = self._ready()
        if self._asleep or self.model.asleep or self._serving is None:
            raise RuntimeError("the engine sleeps")
        made = self._serving.tokens_of(request, intake.sequence(request), self.model.tokenizer)
        try:
            async for token in made:
                yield token
        finally:
            await made.aclose()

    async def sleep(self, level: int = 1) -> None:
        """Give weights and KV memory back. Raises RuntimeError while anything runs, also in another engine
        on the same weights."""
        if level not in (1, 2):
            raise ValueError(f"sleep level {level}: there are 1 and 2")
        self._ready()
        await self.model.quiet()
        self._asleep = True
        await self._call(lambda: self._park(level))

    async def wake(self) -> None:
        """Undo sleep. Raises WakeFailed and stays asleep."""
        self._ready()
        if self._asleep:
            await self._call(self._unpark)
            self._asleep = self.model.asleep = False

    async def settle(self) -> None:
        """Returns between two steps, with everything cancelled gone."""
        await self._call(lambda: None)

    async def close(self) -> None:
        """A step that hangs can't be ended: its thread is left behind, with a word in the log."""
        if self._serving is None:
            return
        serving, self._serving = self._serving, None
        if not serving.dead:
            serving.worker.call(self._end)
        if not await serving.close(self.patience_s):
            log.error("%s: a step hangs; its thread and memory are lost until the process ends", self.name)
            return
        self.model.leave(self)

    @abstractmethod
    def facts(self) -> EngineFacts: ...

    @abstractmethod
    def stats(self) -> EngineStats: ...

    @abstractmethod
    def _build(self) -> Core:
        """Everything but the weights, which are there."""

    @abstractmethod
    def _room(self) -> int:
        """Tokens that one sequence can have at most, whatever the model allows."""

    @abstractmethod
    def _park(self, level: int) -> None: ...

    @abstractmethod
    def _unpark(self) -> None: ...

    @abstractmethod
    def _end(self) -> None:
        """Give back what the core holds."""

    def _begin(self) -> None:
        if self.model.settings.threads:
            torch.set_num_threads(self.model.settings.threads)
        self.model.open()
        core = self._build()
        self._worker_uses(core)

    def _worker_uses(self, core: Core) -> None:
        if self._serving is not None:
            self._serving.worker.use(core)

    def _ready(self) -> Intake:
        if self._serving is not None and self._serving.dead:
            raise EngineDied(self._serving.dead)
        if self._intake is None or self._serving is None:
            raise RuntimeError("the engine was not started" if not self._started else "the engine is closed")
        return self._intake

    async def _call(self, what: Callable[[], T]) -> T:
        if self._serving is None:
            raise RuntimeError("the engine is closed")
        return await asyncio.wrap_future(self._serving.worker.call(what))
