"""How fast a global weight change reaches 1,000 xDS clients, beside a naive server that sends the same bytes.

Law: figures, no asserts. Every row has its peer from the same run; server and stub clients are separate
processes that share the machine's cores. `python -m tests.bench.bench_xds_scale` prints the rows.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CHANGES = 7
"""Weight changes per series; the median is reported."""

Row = dict[str, Any]


class Part:
    """One child process that answers commands with JSON lines."""

    def __init__(self, *arguments: str) -> None:
        command = [
            "setpriv",
            "--pdeathsig",
            "KILL",
            sys.executable,
            "-m",
            "tests.bench.xds_parts",
            *arguments,
        ]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def ask(self, command: str) -> dict[str, float]:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self.hear()

    def hear(self) -> dict[str, float]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.process.args} ended with {self.process.wait()}")
        answer: dict[str, float] = json.loads(line)
        return answer

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextmanager
def world(kind: str, clients: int, deaf: int) -> Iterator[tuple[Part, Part, dict[str, float]]]:
    """Server, clients, and what joining took."""
    with tempfile.TemporaryDirectory(prefix="weir-") as folder:
        path = f"{folder}/ads.sock"
        server = Part("serve", kind, path, str(clients), str(clients - deaf))
        try:
            server.hear()
            stubs = Part("stubs", path, str(clients), str(deaf))
            try:
                joined = stubs.hear()
                joined["rss_mb"] = server.ask("joined")["rss_mb"]
                yield server, stubs, joined
            finally:
                stubs.end()
        finally:
            server.end()


def series(kind: str, clients: int, deaf: int = 0) -> dict[str, float]:
    """Medians over some weight changes: seconds to the last ACK, CPU seconds of the server, MB."""
    with world(kind, clients, deaf) as (server, stubs, joined):
        if deaf:
            stubs.ask("deafen")
        changes = [server.ask(f"change {step}") for step in range(1, CHANGES + 1)]
    return {
        "join_s": joined["seconds"],
        "last_ack_s": statistics.median(c["seconds"] for c in changes),
        "worst_s": max(c["seconds"] for c in changes),
        "cpu_s": statistics.median(c["cpu_s"] for c in changes),
        "rss_mb": max(c["rss_mb"] for c in changes),
    }


def row(metric: str, value: float, unit: str, peer: tuple[str, float], goal: tuple[str, bool]) -> Row:
    return {
        "bench": "xds-scale",
        "metric": metric,
        "value": round(value, 4),
        "unit": unit,
        "peer": peer[0],
        "peer_value": round(peer[1], 4),
        "ratio": round(value / peer[1], 3) if peer[1] else None,
        "goal": goal[0],
        "met": goal[1],
    }


def run(sizes: tuple[int, ...] = (100, 1_000)) -> list[Row]:
    """All rows. About 40 s on two cores."""
    rows = []
    naive = "naive grpc.aio, same bytes, no state"
    for size in sizes:
        ours, peer = series("ours", size), series("naive", size)
        slow = series("ours", size, deaf=1)
        last, worst = ours["last_ack_s"], ours["worst_s"]
        rows += [
            row(
                f"last ACK of {size} streams",
                last,
                "s",
                (naive, peer["last_ack_s"]),
                ("<= 1.0 s", last <= 1.0),
            ),
            row(
                f"last ACK of {size} streams, worst of {CHANGES}",
                worst,
                "s",
                (naive, peer["worst_s"]),
                ("<= 1.0 s", worst <= 1.0),
            ),
            row(
                f"last ACK of the others, one of {size} not answering",
                slow["last_ack_s"],
                "s",
                ("ours, all answering", last),
                ("<= 1.0 s and <= 1.5 x", slow["last_ack_s"] <= min(1.0, max(1.5 * last, 0.1))),
            ),
            row(
                f"server memory at {size} streams",
                ours["rss_mb"],
                "MB",
                (naive, peer["rss_mb"]),
                ("<= 400 MB", ours["rss_mb"] <= 400),
            ),
            row(
                f"server CPU per change, {size} streams",
                ours["cpu_s"],
                "s",
                (naive, peer["cpu_s"]),
                ("<= 3 x", ours["cpu_s"] <= 3 * peer["cpu_s"]),
            ),
            row(
                f"{size} streams join at once, all types taken",
                ours["join_s"],
                "s",
                (naive, peer["join_s"]),
                ("<= 5 s", ours["join_s"] <= 5.0),
            ),
        ]
    return rows


if __name__ == "__main__":
    print(json.dumps(run(), indent=1))
