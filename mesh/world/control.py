"""Talking to a region's supervisor: what runs, hold this down, let it come back, shut down.

Law: the asker's side of mesh.world.wire, blocking and short (from a loop, call it in a thread).
"""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mesh.world.process import ProcessStatus, State
from regions.cli.errors import WeirError

ANSWER_S, HOLD_S = 3.0, 30.0
"""Seconds to wait for an answer; a `hold` may take as long as the process's grace."""


class SupervisorGone(WeirError):
    """Nobody answers on the control socket: the region is down."""


@dataclass(frozen=True, slots=True)
class RegionStatus:
    """ready: all runs and every instance passed its checks. trouble: why registering fails, or empty."""

    ready: bool
    processes: dict[str, ProcessStatus]
    trouble: str = ""


class HasSockets(Protocol):
    """What of a World is needed here."""

    def control_socket(self, region: str) -> Path: ...


class RegionControl:
    """`RegionControl(world, region)`, the same as `world.control(region)`."""

    def __init__(self, world: HasSockets, region: str) -> None:
        self._path, self._region = world.control_socket(region), region

    def status(self) -> dict[str, ProcessStatus]:
        """Process name → state, pid, restarts. Raises SupervisorGone."""
        return self.region().processes

    def region(self) -> RegionStatus:
        return _status(self._ask({"op": "status"}))

    def hold(self, process: str, signal: str = "TERM") -> RegionStatus:
        """Stop a process (`*`: all) with TERM or KILL and keep it down. Returns when it is down."""
        return _status(self._ask({"op": "hold", "process": process, "signal": signal}, HOLD_S))

    def release(self, process: str) -> RegionStatus:
        """Let a held process (`*`: all) come back; returns at once. One that isn't held stays as it is."""
        return _status(self._ask({"op": "release", "process": process}))

    def shutdown(self) -> None:
        """Ask for the orderly end of the region; returns at once."""
        self._ask({"op": "shutdown"})

    def _ask(self, request: dict[str, Any], timeout_s: float = ANSWER_S) -> dict[str, Any]:
        try:
            answer = self._exchange(json.dumps(request).encode() + b"\n", timeout_s)
        except (OSError, ValueError) as error:
            raise SupervisorGone(
                f"region {self._region}", f"its supervisor doesn't answer ({error})", "weir up"
            ) from error
        if not answer.pop("ok"):
            raise WeirError(f"region {self._region}", str(answer["error"]))
        return answer

    def _exchange(self, line: bytes, timeout_s: float) -> dict[str, Any]:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(timeout_s)
            connection.connect(str(self._path))
            connection.sendall(line)
            with connection.makefile("rb") as answers:
                body: dict[str, Any] = json.loads(answers.readline())
        return body


def _status(body: dict[str, Any]) -> RegionStatus:
    processes = {
        name: ProcessStatus(**{**row, "state": State(row["state"])})
        for name, row in body["processes"].items()
    }
    return RegionStatus(body["ready"], processes, body.get("trouble", ""))
