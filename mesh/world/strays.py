"""Processes that carry a world's mark in their environment, and how they are ended.

Law: touches only processes with both marks (WEIR_WORLD of this folder, WEIR_PROCESS), never this one or
its ancestors. A name or a port alone is never a reason to kill.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

import psutil

from mesh.world.layout import MARKER

GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class Stray:
    pid: int
    region: str
    process: str


def find(folder: Path, region: str | None = None) -> tuple[Stray, ...]:
    """All living processes of the world at `folder` (of one region, if given)."""
    mine = {os.getpid(), *(p.pid for p in psutil.Process().parents())}
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid in mine or process.status() == psutil.STATUS_ZOMBIE:
                continue
            env = process.environ()
            if env.get(MARKER) != str(folder) or "WEIR_PROCESS" not in env:
                continue
            stray = Stray(process.pid, env.get("WEIR_REGION", ""), env["WEIR_PROCESS"])
            if region is None or stray.region == region:
                found.append(stray)
    return tuple(found)


def end(strays: tuple[Stray, ...]) -> None:
    """SIGTERM, then SIGKILL for those still there after GRACE_S."""
    there = []
    for stray in strays:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(stray.pid)
            process.terminate()
            there.append(process)
    _, alive = psutil.wait_procs(there, timeout=GRACE_S)
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(alive, timeout=GRACE_S)
