"""The load of a drill, in a process of its own: `python -m drills.load_process SPEC`.

Law: reads one LoadOrder (JSON), sends open-loop load until SIGTERM, appends every finished request as one
JSON line to the order's `out` file at once. The first line says that sending has begun. Judges nothing.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import IO

from drills import load
from drills.history import Request
from mesh.xds.names import SESSION_HEADER

LONGEST_S = 3600.0
"""No drill lasts longer; a generator that nobody stops ends by itself."""
SESSIONS = 10_000
"""Distinct keys. Few would make the share per region a matter of luck: a session is a unit of its own."""
STARTED = {"started": True}


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """urls: base URL of each ingress, by region. Shares, tokens, timeout as in drills.model.Load.

    seed: decides which request streams or carries a session. prefix: makes session keys unique to the drill.
    """

    out: str
    urls: dict[str, str]
    ca_file: str
    service: str
    rate: float
    streams: float
    sessions: float
    tokens: int
    stream_tokens: int
    timeout_s: float
    seed: int
    prefix: str


def maker(order: LoadOrder) -> Callable[[int], load.Request]:
    """Request number n; the same order gives the same requests."""
    rng = Random(order.seed)  # noqa: S311 - load, not secrets
    path = f"/{order.service}/v1/completions"

    def make(index: int) -> load.Request:
        stream, session = rng.random() < order.streams, ""
        if rng.random() < order.sessions:
            session = f"{order.prefix}-{rng.randrange(SESSIONS)}"
        # No model: whatever the world serves.
        body = {
            "prompt": f"drill request {index}",
            "max_tokens": order.stream_tokens if stream else order.tokens,
            "stream": stream,
        }
        headers = {"content-type": "application/json"} | ({SESSION_HEADER: session} if session else {})
        return load.Request(path, headers, json.dumps(body).encode(), stream, session)

    return make


def to_request(sample: load.Sample, regions: dict[str, str]) -> Request:
    """A generator's sample as a drill records it. regions: region by base URL."""
    return Request(
        due_s=sample.due_s,
        sent_s=sample.sent_s,
        latency_s=sample.latency_s,
        ok=sample.ok,
        status=sample.status,
        ingress=regions[sample.url],
        region=sample.region,
        stage=sample.stage,
        session=bool(sample.session),
        stream=sample.stream,
        cut=sample.cut and sample.stream,
        attempts=sample.attempts,
        error=sample.error,
    )


async def send(order: LoadOrder, out: IO[str]) -> None:
    """Send until SIGTERM or SIGINT; then wait for what is under way."""
    stop = asyncio.Event()
    for sign in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(sign, stop.set)
    regions = {url.rstrip("/"): region for region, url in order.urls.items()}

    def note(sample: load.Sample) -> None:
        out.write(json.dumps(asdict(to_request(sample, regions))) + "\n")
        out.flush()

    out.write(json.dumps(STARTED) + "\n")
    out.flush()
    await load.open_loop(
        list(order.urls.values()),
        order.rate,
        LONGEST_S,
        ca_file=order.ca_file,
        make_request=maker(order),
        on_sample=note,
        stop=stop,
        timeout_s=order.timeout_s,
    )


def main(argv: list[str]) -> None:
    order = LoadOrder(**json.loads(Path(argv[1]).read_text(encoding="utf-8")))
    with Path(order.out).open("a", encoding="utf-8") as out:
        asyncio.run(send(order, out))


if __name__ == "__main__":
    main(sys.argv)
