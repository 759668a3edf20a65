"""A region cut off from the others and back: each side keeps its own weight, then all come to one.

Law: cut by the packet rules of the drills' own fault, on the addresses of this world only, and healed in
`finally`. Without the right to set packet rules the test is skipped and says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import urllib.error
from collections.abc import Callable, Coroutine, Iterator, Mapping
from random import Random
from typing import Any

import pytest

from drills.faults.base import FaultSpec
from drills.faults.network import CutOffRegion
from drills.live import open_doors
from drills.live_packets import LivePackets
from mesh.clock import SystemClock
from tests.e2e.breaking import under_load
from tests.e2e.mesh_world import CANARY, MeshWorld

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(240)]

PRIMARY, SECOND, THIRD = "cn-north-1", "us-east-1", "westeurope"


class Diary:
    """The applied canary weights of every region in the order they were seen, without repeats."""

    def __init__(self, world: MeshWorld) -> None:
        self.seen: dict[str, list[float]] = {region: [] for region in world.names}
        self._world, self._over = world, threading.Event()
        self._threads = [threading.Thread(target=self._follow, args=(r,), daemon=True) for r in world.names]

    def __enter__(self) -> Diary:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(20)

    def holds(self, wanted: Mapping[str, float]) -> bool:
        """Whether these were seen last. Of what passes before it has looked, the diary can't tell."""
        return all(self.seen[region][-1:] == [value] for region, value in wanted.items())

    def _follow(self, region: str) -> None:
        while not self._over.wait(0.03):
            with contextlib.suppress(urllib.error.URLError, TimeoutError):
                found = self._world.document(region)
                if (
                    found
                    and found["applied"]
                    and found["canary_weight"]["value"] not in self.seen[region][-1:]
                ):
                    self.seen[region].append(found["canary_weight"]["value"])


@contextlib.contextmanager
def cut_off(world: MeshWorld, region: str) -> Iterator[None]:
    """No packet passes between the region and the others for the length of the block."""

    def do(step: Callable[[CutOffRegion], Coroutine[Any, Any, object]]) -> None:
        async def run() -> None:
            spec = FaultSpec("cut-off-region", region, "chat", f"e2e-{os.getpid()}")
            async with open_doors(world.world, "chat", SystemClock(), Random(1)) as doors:
                await step(CutOffRegion(spec, doors))

        asyncio.run(run())

    try:
        do(CutOffRegion.inject)
        yield
    finally:
        do(CutOffRegion.heal)


def test_both_sides_of_a_cut_end_on_one_weight_without_a_flap(calm: MeshWorld) -> None:
    if why := asyncio.run(LivePackets(calm.world).check()):
        pytest.skip(f"no region can be cut off here: {why}")
    own = {PRIMARY: 0.2, SECOND: 0.3, THIRD: 0.2}
    with under_load(calm) as load, Diary(calm) as diary:
        with cut_off(calm, SECOND):
            calm.until("the others notice", lambda: down(calm, PRIMARY) == down(calm, THIRD) == {SECOND})
            calm.until("it notices", lambda: down(calm, SECOND) == {PRIMARY, THIRD})
            calm.put(SECOND, CANARY, "0.3")
            calm.put(PRIMARY, CANARY, "0.2")
            for region, value in own.items():
                calm.applied(value, regions=(region,))
            calm.until("the diary has the own weights", lambda: diary.holds(own))
            load.lasts(3.0)
            assert {r: calm.get(r, CANARY) for r in calm.names} == {r: str(v) for r, v in own.items()}
            known = {r: len(seen) for r, seen in diary.seen.items()}
        calm.until("one winner", lambda: len({calm.get(r, CANARY) for r in calm.names}) == 1)
        winner = float(calm.get(PRIMARY, CANARY) or 0)
        calm.applied(winner)
        calm.until("the diary has the winner", lambda: diary.holds(dict.fromkeys(own, winner)))
        calm.until("everybody hears everybody", lambda: not any(down(calm, r) for r in calm.names), 60)
        calm.put(SECOND, CANARY, "0.15")
        calm.applied(0.15)
        calm.until("the diary has the last", lambda: diary.holds(dict.fromkeys(own, 0.15)))
        load.lasts(1.0)
    load.unharmed()
    assert winner in own.values()
    for region, seen in diary.seen.items():
        assert seen[known[region] :] == [winner, 0.15][own[region] == winner :], f"{region} flapped: {seen}"


def down(world: MeshWorld, region: str) -> set[str]:
    """Regions whose path doesn't answer, as this region sees it."""
    return {name for name, word in world.document(region).get("path", {}).items() if word == "down"}
