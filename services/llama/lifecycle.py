"""What both torch engines share: start, size, generate, sleep, wake, close around a core in a worker thread.

Law: keeps the order of an engine's life; decides nothing about steps. What blocks (loading, parking, steps,
giving back) runs in the worker's thread, never in the event loop; there it comes to its end whoever gave up
waiting, so what came of it is noted there too.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from typing import TypeVar

import torch

from services.engine import EngineFacts, EngineStats, GenerateRequest, Token
from services.faults import DeviceLost, EngineDied, EngineFault, WakeFailed
from services.llama.core import Core, is_device_lost
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
    quiet_s = 60.0
    """And how long `sleep` does."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._serving: Serving | None = None
        self._intake: Intake | None = None
        self._facts: EngineFacts | None = None
        self._started = self._asleep = False

    async def start(self) -> None:
        """Raises WeirError for what is missing or broken, DeviceLost; RuntimeError a second time."""
        if self._started:
            raise RuntimeError("the engine runs already")
        self._started = True
        self._serving = Serving(self.name, self._over)
        await self._call(self._begin)
        if self._serving is None:
            raise RuntimeError("the engine was closed while it started")
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
        was, self._asleep = self._asleep, True
        parking = self._later(lambda: self._lie_down(level))
        try:
            await _told(parking)
        except asyncio.CancelledError:
            if parking.cancel():
                # It had not begun.
                self._asleep, self.model.asleep = was, self.model.level > 0
            raise

    async def wake(self) -> None:
        """Undo sleep. Raises WakeFailed or DeviceLost and stays asleep."""
        self._ready()
        if self._asleep:
            await self._call(self._get_up)

    async def settle(self) -> None:
        """Returns between two steps, with everything cancelled gone. Raises RuntimeError when a step takes
        too long for that."""
        try:
            async with asyncio.timeout(self.quiet_s):
                await self._call(lambda: None)
        except TimeoutError:
            raise RuntimeError(f"a step of {self.name} takes more than {self.quiet_s:g} s") from None

    async def close(self) -> None:
        """A step that hangs can't be ended: its thread is left behind, with a word in the log."""
        serving, self._serving, self._intake = self._serving, None, None
        if serving is not None and not await serving.close(self.patience_s):
            log.error("%s: a step (or a load) hangs; its thread holds all memory until that ends", self.name)

    def facts(self) -> EngineFacts:
        """Those that it started with stay, though weights and KV cache be gone."""
        return self._facts or self._describe()

    @abstractmethod
    def _describe(self) -> EngineFacts:
        """As far as it is known before the start; the whole when all is built."""

    @abstractmethod
    def stats(self) -> EngineStats: ...

    @abstractmethod
    def _build(self) -> Core:
        """Everything but the weights, which are there."""

    @abstractmethod
    def _room(self) -> int:
        """Tokens that one sequence can have at most, whatever the model allows."""

    @abstractmethod
    def _needs(self) -> int:
        """Bytes of the device that it takes beside the weights when it wakes; 0 when it has them."""

    @abstractmethod
    def _give_back(self) -> None:
        """Everything but the weights."""

    @abstractmethod
    def _take_back(self, level: int) -> None:
        """Have it again, and look whether all is as it was. level: at which the weights slept, 0: they were
        awake. Raises WakeFailed for another answer than before."""

    @abstractmethod
    def _end(self) -> None:
        """Let go of the core and all that it holds. Fine when there is none."""

    def _begin(self) -> None:
        if self.model.settings.threads:
            torch.set_num_threads(self.model.settings.threads)
        self.model.open(self)
        core = self._build()
        self._facts = self._describe()
        if self._serving is not None:
            self._serving.worker.use(core)

    def _lie_down(self, level: int) -> None:
        try:
            self.model.park(level)
        except BaseException:
            # With everything still here it serves on.
            self.model.asleep = self.model.level > 0
            self._asleep = self.model.asleep or self._needs() > 0
            raise
        self._give_back()

    def _get_up(self) -> None:
        if not self._asleep:
            # Who gave up waiting for the wake before this one had it all the same.
            return
        level = self.model.level
        self.model.unpark(more=self._needs())
        try:
            self._take_back(level)
        except BaseException as error:
            self._fall_back(level, wrong=isinstance(error, WakeFailed))
            if isinstance(error, EngineFault) or is_device_lost(error):
                raise
            raise WakeFailed(f"what it needs beside the weights doesn't come back: {error}") from error
        self._asleep = self.model.asleep = False

    def _fall_back(self, level: int, *, wrong: bool) -> None:
        """Asleep as before. Weights that answered wrong are not kept: the next wake reads them anew. Those
        that were awake already are another engine's too."""
        try:
            self._give_back()
        finally:
            if level:
                self.model.park_again(2 if wrong else level)

    def _over(self) -> None:
        """The last thing in the worker's thread, also in one that was left behind."""
        try:
            self._end()
        finally:
            self.model.leave(self)

    def _ready(self) -> Intake:
        if self._serving is not None and self._serving.dead:
            raise EngineDied(self._serving.dead)
        if self._intake is None or self._serving is None:
            raise RuntimeError("the engine was not started" if not self._started else "the engine is closed")
        return self._intake

    async def _call(self, what: Callable[[], T]) -> T:
        return await _told(self._later(what))

    def _later(self, what: Callable[[], T]) -> Future[T]:
        if self._serving is None:
            raise RuntimeError("the engine is closed")
        return self._serving.worker.call(what)


async def _told(future: Future[T]) -> T:
    """What came of it. Raises DeviceLost for the device's own faults."""
    try:
        return await asyncio.wrap_future(future)
    except torch.AcceleratorError as error:
        if is_device_lost(error):
            raise DeviceLost(f"{type(error).__name__}: {error}") from error
        raise
