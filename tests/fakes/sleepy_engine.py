"""An engine for the pool's tests: echo's tokens, memory on a fake device, and whatever may go wrong on order.

Law: in-process and deterministic; keeps the Engine protocol but for what the test ordered. A `Herald` of the
same kind writes down what Consul would have been told.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field, replace

from services.devices.door import Binding
from services.engine import EngineFacts, EngineStats, GenerateRequest, Token
from services.engines.echo import EchoEngine, EchoOptions

MEMORY = 1000


@dataclass
class Orders:
    """on_sleep, on_wake, on_start: called in the verb; what they raise, it raises. keeps: bytes it doesn't
    give back. garbage: added to every token id once it has slept; cold_garbage: after a cold start;
    token_shift: always. proves: it says that its wake needs no other proof. wake_s, close_s: how long that
    takes. log: what was called. living: engines that hold memory."""

    on_sleep: Callable[[], object] = lambda: None
    on_wake: Callable[[], object] = lambda: None
    on_start: Callable[[Binding], object] = lambda _: None
    keeps: int = 0
    garbage: int = 0
    cold_garbage: int = 0
    token_shift: int = 0
    proves: bool = False
    wake_s: float = 0.0
    close_s: float = 0.0
    token_cost_ms: float = 1.0
    log: list[str] = field(default_factory=list)
    living: int = 0


class SleepyEngine(EchoEngine):
    """number: how often one was built before."""

    def __init__(self, orders: Orders, where: Binding, number: int) -> None:
        super().__init__(EchoOptions(token_cost_ms=orders.token_cost_ms))
        self.orders, self.where, self.number = orders, where, number
        self.memory, self._slept, self.is_asleep = 0, False, False

    async def start(self) -> None:
        self.orders.log.append(f"start {self.number} {self.where.uuid}".rstrip())
        self.orders.on_start(self.where)
        await super().start()
        self.orders.living += 1
        self.memory = MEMORY

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Token, None]:
        async for token in super().generate(request):
            off = self.orders.garbage if self._slept else self.orders.cold_garbage if self.number else 0
            yield replace(token, token_id=token.token_id + off + self.orders.token_shift)

    async def sleep(self, level: int = 1) -> None:
        self.orders.log.append(f"sleep {level}")
        await super().sleep(level)
        try:
            self.orders.on_sleep()
        except BaseException:
            self._asleep = False
            raise
        self.memory, self._slept, self.is_asleep = self.orders.keeps, True, True

    async def wake(self) -> None:
        self.orders.log.append("wake")
        await asyncio.sleep(self.orders.wake_s)
        self.orders.on_wake()
        await super().wake()
        self.memory, self.is_asleep = MEMORY, False

    def facts(self) -> EngineFacts:
        proves = self.orders.proves
        return replace(super().facts(), sleep_levels=(1, 2), device=self.where.torch, wake_proves=proves)

    def stats(self) -> EngineStats:
        return replace(super().stats(), memory_bytes=self.memory)

    async def close(self) -> None:
        self.orders.log.append(f"close {self.number}")
        await asyncio.sleep(self.orders.close_s)
        self.orders.living -= self.memory > 0 or self.is_asleep
        self.memory, self.is_asleep = 0, False


@dataclass
class Scribe:
    """A Herald. log: what Consul was told, in order. deaf: it can't be told."""

    log: list[str] = field(default_factory=list)
    deaf: bool = False
    device: str = ""
    slept_at: int = 0
    on_tell: Callable[[str], object] = lambda _: None

    async def become(self, lifecycle: str, slept_at: int = 0) -> bool:
        await asyncio.sleep(0.01)
        if self.deaf:
            return False
        self.on_tell(lifecycle)
        self.log.append(lifecycle)
        self.slept_at = slept_at
        return True

    def place(self, device: str) -> None:
        self.device = device
