"""One instance of the hot pool in virtual time: `lived(test, Orders(…))` gives it to a test as a `World`.

Law: fake devices and a fake Consul; nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

from services.devices.fake import FakeDevices
from services.engine import GenerateRequest
from services.instance import Identity, Instance
from services.lifecycle import Lifecycle, State
from services.pool.hotstart import HotPool
from services.pool.parts import Parts, PoolSettings
from services.pool.renewable import Renewable
from services.pool.steps import Outcome
from services.registration import Drain
from tests.fakes.loop_clock import LoopClock
from tests.fakes.sleepy_engine import Orders, Scribe, SleepyEngine
from tests.virtual import run

WHO = Identity("chat", "chat-stable-0", "us-east-1", "z1", "stable", "7", "echo-1")


class World:
    """One instance with fake devices, everything about it in reach."""

    def __init__(self, orders: Orders, devices: FakeDevices | None, file: Path | None = None) -> None:
        self.orders, self.devices, self.scribe = orders, devices, Scribe()
        home = devices.bind(devices.list()[0].uuid) if devices else None
        self.built = 0

        def build(where: Any) -> SleepyEngine:
            self.built += 1
            return SleepyEngine(orders, where, self.built - 1)

        self.engine = Renewable(build, home) if home else Renewable(build)
        self.instance = Instance(WHO, self.engine, Lifecycle())
        settings = PoolSettings(drain=Drain(5.0, 0.5), wake_limit_s=10, close_limit_s=3, ask_limit_s=5)
        self.pool = HotPool(
            Parts(
                self.instance, self.engine, LoopClock(), self.scribe, devices,
                options={"api_key": "hush", "dtype": "fp32"}, snapshot_file=file, settings=settings,
            )
        )  # fmt: skip

    async def begin(self) -> World:
        await self.engine.start()
        self.instance.lifecycle.to(State.RUNNING)
        return self

    @property
    def state(self) -> State:
        return self.instance.lifecycle.state

    async def request(self, tokens: int = 5) -> str:
        """One request as the server makes it."""
        self.instance.enter()
        try:
            async with aclosing(self.engine.generate(GenerateRequest("r", "hi", tokens))) as made:
                return "".join([token.text async for token in made])
        finally:
            self.instance.leave()


def lived(
    test: Callable[[World], Awaitable[None]],
    orders: Orders | None = None,
    devices: FakeDevices | None = None,
    file: Path | None = None,
) -> World:
    async def main() -> World:
        world = await World(orders or Orders(), devices, file).begin()
        await test(world)
        return world

    return run(main())


def names(outcome: Outcome) -> list[str]:
    return [step.name for step in outcome.steps]


def raises(error: BaseException) -> Callable[..., object]:
    def act(*_: object) -> None:
        raise error

    return act


def cards(count: int = 2) -> FakeDevices:
    made = FakeDevices(seed=3, count=count, memory=10_000)
    for device in made.list():
        made.set_load(device.uuid, 0.2)
        made.set_used(device.uuid, 0)
    return made
