"""What the mesh adds to one request: ingress + sidecar + mTLS against calling the executor directly.

Law: figures, no asserts. All ways lead to the same executor at the same rate, in short turns by A B C C B A,
so that whatever else the machine does falls on all. Tokens cost nothing here. The goal is for the way that a
client takes, with TLS; the way in without TLS only tells how much of it is TLS between client and ingress
(0.45 of 1.6 ms on a quiet machine), a good part of which is spent in this Python client.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from drills.load import Request, Sample, open_loop
from mesh.world.addresses import EXECUTOR
from mesh.world.spec import SERVICE
from mesh.world.wish import Wish
from tests.bench.own_world import own_world

NAME = "overhead"
REGION = "us-east-1"
RATE = 200.0
TURN_S, WARM_UP_S = 3.5, 2.0
SETTLE_S = 0.5
"""The start of each turn isn't counted: connections are being opened, which is not what a request costs."""
DIRECT, INGRESS, PLAIN = "direct", "ingress", "ingress without TLS"
TURNS = (DIRECT, INGRESS, PLAIN, PLAIN, INGRESS, DIRECT) * 2
PEER = "the same executor, called directly over HTTP"


def run() -> list[dict[str, Any]]:
    """About a minute: a world of one region and one instance, then the turns."""
    wish = Wish(regions=(REGION,), instances=1, canaries=0, token_cost_ms=0.0, http=True)
    with own_world(wish) as world:
        where = world.address(REGION)
        bases = {
            DIRECT: f"http://{where.instance(0)}:{EXECUTOR}",
            INGRESS: f"{where.ingress_https}/{SERVICE}",
            PLAIN: f"{where.ingress_http}/{SERVICE}",
        }
        found = asyncio.run(measure(bases, world.ca_file))
    return rows(found)


async def measure(bases: Mapping[str, str], ca_file: Path) -> dict[str, list[Sample]]:
    """All samples of all ways, without those of the warm-up and of each turn's start."""
    found: dict[str, list[Sample]] = {way: [] for way in bases}
    for base in bases.values():
        await _send(base, WARM_UP_S, ca_file)
    for way in TURNS:
        turn = await _send(bases[way], TURN_S, ca_file)
        found[way] += [s for s in turn if s.due_s - turn[0].due_s >= SETTLE_S]
    return found


async def _send(base: str, duration_s: float, ca_file: Path) -> list[Sample]:
    ca = ca_file if base.startswith("https") else None
    return await open_loop([base], RATE, duration_s, ca_file=ca, make_request=_request)


def _request(index: int) -> Request:
    body = {"model": "echo-1", "prompt": f"request {index}", "max_tokens": 8}
    return Request("/v1/completions", {"content-type": "application/json"}, json.dumps(body).encode())


def rows(found: Mapping[str, Sequence[Sample]]) -> list[dict[str, Any]]:
    """Figures of all ways. Latencies of answers that failed don't count; the failures have their own row."""
    ms = {way: sorted(s.latency_s * 1000 for s in found[way] if s.ok) for way in found}
    failed = {way: float(sum(not s.ok for s in found[way])) for way in found}
    base, base99 = quantile(ms[DIRECT], 0.5), quantile(ms[DIRECT], 0.99)
    at = f"at {RATE:.0f} requests/s"
    return [
        _row(f"added p50 {at}", quantile(ms[INGRESS], 0.5) - base, base, goal="<= 1.5 ms"),
        _row(f"added p50 {at}, no TLS from the client", quantile(ms[PLAIN], 0.5) - base, base),
        _row(f"p50 by the ingress {at}", quantile(ms[INGRESS], 0.5), base),
        _row(f"p99 by the ingress {at}", quantile(ms[INGRESS], 0.99), base99),
        _row(f"failed of {len(found[INGRESS])}", failed[INGRESS], failed[DIRECT], "requests", "== 0"),
    ]


def _row(metric: str, value: float, peer_value: float, unit: str = "ms", goal: str = "") -> dict[str, Any]:
    return {
        "bench": NAME,
        "metric": metric,
        "value": value,
        "unit": unit,
        "goal": goal,
        "peer": PEER,
        "peer_value": peer_value,
    }


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value that `share` of the ordered values don't exceed; NaN of nothing."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan
