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
from services.recipe import Recipe
from services.registration import Drain
from tests.fakes.loop_clock import LoopClock
from tests.fakes.sleepy_engine import Orders, Scribe, SleepyEngine
from tests.virtual import run

WHO = Identity("chat", "chat-stable-0", "us-east-1", "z1", "stable", "7", "echo-1")


RECIPE = Recipe("echo", "echo-1", {"api_key": "hush", "dtype": "fp32", "api_key_env": "KEY"})


class World:
    """One instance with fake devices, everything about it in reach. from_snapshot: a rebuild is made from the
    snapshot; recipes: of those that were."""

    def __init__(
        self,
        orders: Orders,
        devices: FakeDevices | None,
        file: Path | None = None,
        *,
        from_snapshot: bool = False,
    ) -> None:
        self.orders, self.devices, self.scribe = orders, devices, Scribe()
        home = devices.bind(devices.list()[0].uuid) if devices else None
        self.built, self.recipes = 0, list[Recipe]()

        def build(where: Any) -> SleepyEngine:
            self.built += 1
            return SleepyEngine(orders, where, self.built - 1)

        def build_from(recipe: Recipe, where: Any) -> SleepyEngine:
            self.recipes.append(recipe)
            return build(where)

        self.engine = Renewable(build, home) if home else Renewable(build)
        self.instance = Instance(WHO, self.engine, Lifecycle())
        settings = PoolSettings(drain=Drain(5.0, 0.5), wake_limit_s=10, close_limit_s=3, ask_limit_s=5)
        self.pool = HotPool(
            Parts(
                self.instance, self.engine, LoopClock(), self.scribe, devices,
                recipe=RECIPE, build=build_from if from_snapshot else None,
                snapshot_file=file, settings=settings,
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
    *,
    from_snapshot: bool = False,
) -> World:
    async def main() -> World:
        world = World(orders or Orders(), devices, file, from_snapshot=from_snapshot)
        await world.begin()
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
