"""A key put in one region until it is applied in all three: every proxy of every region has acknowledged.

Law: figures, no asserts. The end is read from the status documents' own times (one machine, one clock), so
that neither the poll nor the write of the document is counted.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from typing import Any

from mesh.clock import SystemClock
from mesh.consul import keys
from mesh.consul.client import Consul
from mesh.world.wish import Wish
from mesh.world.world import World
from tests.bench.own_world import own_world

NAME = "global_change"
CHANGES, WARM_UP = 60, 3
DEADLINE_S = 20.0


def run() -> list[dict[str, Any]]:
    """About 40 s: a world of three regions, one put after another, each region in turn."""
    with own_world(Wish(instances=1, canaries=1, token_cost_ms=0.0)) as world:
        here, everywhere = asyncio.run(measure(world))
    return rows(here, everywhere)


async def measure(world: World) -> tuple[list[float], list[float]]:
    """Milliseconds from the start of the put to applied: in the region of the put, and in the last region."""
    clock = SystemClock()
    here: list[float] = []
    everywhere: list[float] = []
    async with AsyncExitStack() as stack:
        agents = {
            r: await stack.enter_async_context(Consul(world.address(r).consul_http))
            for r in world.regions.names
        }
        names = list(agents)
        for turn in range(WARM_UP + CHANGES):
            origin, weight = names[turn % len(names)], round(0.01 + 0.01 * (turn % 90), 2)
            start = clock.time()
            await agents[origin].kv_put(keys.DEFAULT_CANARY, f"{weight}".encode())
            times = await _applied(agents, weight, start)
            if turn >= WARM_UP:
                here.append((times[origin] - start) * 1000)
                everywhere.append((max(times.values()) - start) * 1000)
    return sorted(here), sorted(everywhere)


async def _applied(agents: dict[str, Consul], weight: float, start: float) -> dict[str, float]:
    """Unix seconds at which each region applied this weight."""
    found: dict[str, float] = {}
    async with asyncio.timeout(DEADLINE_S):
        while len(found) < len(agents):
            for region in set(agents) - set(found):
                entry = await agents[region].kv_get(keys.status("chat", region))
                body = json.loads(entry.value) if entry else {}
                same = body and body["canary_weight"]["value"] == weight and body["applied"]
                if same and body["times"]["applied"] >= start:
                    found[region] = body["times"]["applied"]
            await asyncio.sleep(0.01)
    return found


def rows(here: list[float], everywhere: list[float]) -> list[dict[str, Any]]:
    def at(ordered: list[float], share: float) -> float:
        return ordered[min(len(ordered) - 1, round(share * len(ordered)))]

    out = []
    for share, goal in ((0.5, ""), (0.99, "<= 500 ms")):
        out.append(
            {
                "bench": NAME,
                "metric": f"p{share * 100:.0f} of {len(everywhere)} puts to applied in all three regions",
                "value": at(everywhere, share),
                "unit": "ms",
                "goal": goal,
                "peer": "applied in the region of the put alone",
                "peer_value": at(here, share),
            }
        )
    return out
