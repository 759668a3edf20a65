"""Is the share what was ordered? 10,000 requests at 15 %, with sessions and without; and sessions that stay.

Law: figures, no asserts. The peer of a share is the chance deviation that so few requests have anyway (three
standard errors): a deviation below that is not to be told from none.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from typing import Any

from drills.load import Request, Sample, open_loop
from mesh.consul import keys
from mesh.consul.client import Consul
from mesh.world.wish import Wish
from mesh.world.world import World
from tests.bench.own_world import own_world

NAME = "share"
REGION = "us-east-1"
RATE, REQUESTS, SESSIONS = 400.0, 10_000, 1_500
WEIGHT = 0.15
GROWTH = (0.05, 0.15, 0.30)


def run() -> list[dict[str, Any]]:
    """About 90 s: a world of one region, two stable instances and a canary."""
    with own_world(Wish(regions=(REGION,), instances=2, canaries=1, token_cost_ms=0.0)) as world:
        return asyncio.run(measure(world))


async def measure(world: World) -> list[dict[str, Any]]:
    out = []
    async with Consul(world.address(REGION).consul_http) as consul:
        await _set(consul, WEIGHT)
        for name, session in (("without sessions", None), ("with sessions", lambda i: f"session-{i}")):
            samples = await _load(world, REQUESTS, session)
            out += _share_rows(name, samples)
        out.append(await _growth(world, consul))
    return out


async def _growth(world: World, consul: Consul) -> dict[str, Any]:
    """How many sessions left the canary while its weight grew."""
    before: dict[str, str] = {}
    left = 0
    for weight in GROWTH:
        await _set(consul, weight)
        now = {s.session: s.stage for s in await _load(world, SESSIONS, lambda i: f"grown-{i}") if s.ok}
        left += sum(stage == "canary" and now.get(name) == "stable" for name, stage in before.items())
        before = now
    steps = " -> ".join(f"{w * 100:g}" for w in GROWTH)
    return {
        "bench": NAME,
        "metric": f"sessions of {SESSIONS} that left the canary while it grew {steps} %",
        "value": float(left),
        "unit": "sessions",
        "goal": "== 0",
    }


async def _load(world: World, count: int, session: Callable[[int], str] | None) -> list[Sample]:
    body = json.dumps({"prompt": "share", "max_tokens": 1}).encode()

    def make(index: int) -> Request:
        name = session(index) if session else ""
        return Request("/chat/v1/completions", {"x-session-id": name} if name else {}, body, session=name)

    where = world.address(REGION)
    return await open_loop(
        [where.ingress_https], RATE, count / RATE, ca_file=world.ca_file, make_request=make
    )


async def _set(consul: Consul, weight: float) -> None:
    await consul.kv_put(keys.DEFAULT_CANARY, f"{weight}".encode())
    async with asyncio.timeout(20):
        while True:
            entry = await consul.kv_get(keys.status("chat", REGION))
            body = json.loads(entry.value) if entry else {}
            if body and body["canary_weight"]["value"] == weight and body["applied"]:
                return
            await asyncio.sleep(0.02)


def _share_rows(name: str, samples: list[Sample]) -> list[dict[str, Any]]:
    answered = [s for s in samples if s.ok]
    share = sum(s.stage == "canary" for s in answered) / max(1, len(answered))
    chance = 3 * math.sqrt(WEIGHT * (1 - WEIGHT) / max(1, len(answered)))
    common: dict[str, Any] = {"bench": NAME}
    deviation = {
        "metric": f"deviation from {WEIGHT * 100:g} % in {len(answered)} requests {name}",
        "value": abs(share - WEIGHT) * 100,
        "unit": "points",
        "goal": "<= 1 points",
        "peer": "three standard errors of so few requests",
        "peer_value": chance * 100,
    }
    failed = {
        "metric": f"failed of {len(samples)} {name}",
        "value": float(len(samples) - len(answered)),
        "unit": "requests",
        "goal": "== 0",
    }
    return [common | deviation, common | failed]
