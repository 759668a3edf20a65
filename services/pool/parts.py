"""What the verbs of one instance work with: its engine, who tells Consul, devices, limits.

Law: types and values; nothing is done here but standing in for a Consul that is not there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from mesh.clock import Clock
from services.devices.door import Binding, Devices
from services.engine import Engine
from services.instance import Instance
from services.pool.lru import MOST_ASLEEP
from services.pool.place import BUSY
from services.pool.renewable import Renewable
from services.pool.verify import GIVEN_BACK
from services.recipe import Recipe
from services.registration import Drain


class Herald(Protocol):
    """What is needed of services.registration.Registration."""

    async def become(self, lifecycle: str, slept_at: int = 0) -> bool:
        """Tell Consul; False when it couldn't be told."""

    def place(self, device: str) -> None:
        """On which device the instance is, from the next telling on."""


class Nobody:
    """A Herald where the instance is not registered: there is nobody to tell."""

    async def become(self, lifecycle: str, slept_at: int = 0) -> bool:
        return True

    def place(self, device: str) -> None:
        """Nobody asks."""


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """Seconds and shares. drain: how long what runs may take, and how long nothing may have come in before
    the engine sleeps. wake_limit_s: longest wake. start_limit_s: longest cold start. ask_limit_s: longest
    answer to the fixed prompt. close_limit_s: longest goodbye of an engine that is replaced. cold_tries:
    cold starts before it stays quarantined. given_back: least share of memory. busy: load of a device over
    which a sleeper wakes elsewhere. most_asleep: instances that sleep on one device; beyond, the least
    recently used goes cold. heal_first_s: so long one that is broken is left alone before its first cold
    start, for others to notice; heal_longest_s: at most so long between two, doubling.
    Raises ValueError for values that make no sense.
    """

    drain: Drain = field(default_factory=Drain)
    wake_limit_s: float = 60.0
    start_limit_s: float = 600.0
    ask_limit_s: float = 60.0
    close_limit_s: float = 30.0
    cold_tries: int = 2
    given_back: float = GIVEN_BACK
    busy: float = BUSY
    most_asleep: int = MOST_ASLEEP
    heal_first_s: float = 10.0
    heal_longest_s: float = 300.0

    def __post_init__(self) -> None:
        for name in ("wake_limit_s", "start_limit_s", "ask_limit_s", "close_limit_s", "heal_first_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} = {getattr(self, name):g}: more than 0")
        for name in ("given_back", "busy"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} = {getattr(self, name):g}: from 0 to 1")
        for name, low in (("cold_tries", 1), ("most_asleep", 0), ("heal_longest_s", self.heal_first_s)):
            if not getattr(self, name) >= low:
                raise ValueError(f"{name} = {getattr(self, name):g}: at least {low:g}")


@dataclass(frozen=True, slots=True)
class Parts:
    """engine: the outermost one, the same as `instance.engine`. devices: None where loads and memory are not
    looked at. recipe: what the engine is built from. build: makes one, not started, from a snapshot's recipe;
    None: `engine` alone knows how. model_folder: described in the snapshot, where there is one.
    snapshot_file: where it is kept. slices: the engine is a child process, which may go to another MIG slice.
    """

    instance: Instance
    engine: Renewable
    clock: Clock
    herald: Herald = field(default_factory=Nobody)
    devices: Devices | None = None
    recipe: Recipe = field(default_factory=Recipe)
    build: Callable[[Recipe, Binding], Engine] | None = None
    model_folder: Path | None = None
    snapshot_file: Path | None = None
    settings: PoolSettings = field(default_factory=PoolSettings)
    slices: bool = True
