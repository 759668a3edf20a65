"""The CPU of this machine as one device, "cpu": its load by psutil, its memory by /proc and the cgroup.

Law: reads only. In a container the smaller of the machine's memory and the cgroup's limit is what there is.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path

import psutil

from services.devices.door import Binding, Device, unknown

CPU = "cpu"
FIRST_LOOK_S = 0.1
"""psutil tells the load since its last call; the first one needs something to look at."""


class HostDevices:
    """Devices. root: where /proc and /sys stand (a test hands in its own)."""

    kind = "host"

    def __init__(self, root: Path = Path("/")) -> None:
        self._root, self._looked = root, False

    def list(self) -> tuple[Device, ...]:
        busy = psutil.cpu_percent(interval=None if self._looked else FIRST_LOOK_S) / 100
        self._looked = True
        total, used = memory(self._root)
        name = f"CPU, {os.cpu_count() or 1} cores"
        return (Device(0, CPU, name, total, used, min(1.0, busy)),)

    def bind(self, uuid: str) -> Binding:
        if uuid != CPU:
            raise unknown(uuid, self.list())
        # An empty value hides every GPU from the child.
        return Binding(CPU, CPU, {"CUDA_VISIBLE_DEVICES": ""})

    def close(self) -> None:
        """It holds nothing."""


def host_id(root: Path = Path("/")) -> str:
    """This machine, by one name for all its containers (a hostname is each container's own): the boot of its
    kernel, which no sleeper outlives."""
    try:
        return (root / "proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()


def memory(root: Path = Path("/")) -> tuple[int, int]:
    """(total, used) in bytes; used is what could not be had without swapping."""
    rows = dict(_row(line) for line in (root / "proc/meminfo").read_text().splitlines() if ":" in line)
    total, free = rows["MemTotal"], rows["MemAvailable"]
    limit, used = _cgroup(root)
    if limit is not None and limit < total:
        # What the machine lacks, the cgroup can't have either.
        return limit, limit - max(0, min(free, limit - used))
    return total, total - free


def _row(line: str) -> tuple[str, int]:
    name, _, value = line.partition(":")
    return name, int(value.split()[0]) * 1024


def _cgroup(root: Path) -> tuple[int | None, int]:
    """(limit, used without page cache) of version 2, else of version 1; None: no limit is set."""
    for folder, limit, used, stat, cache in (
        ("sys/fs/cgroup", "memory.max", "memory.current", "memory.stat", "file"),
        (
            "sys/fs/cgroup/memory",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "memory.stat",
            "total_cache",
        ),
    ):
        try:
            where = root / folder
            bound, taken = (where / limit).read_text().strip(), int((where / used).read_text())
            rows = dict(line.split() for line in (where / stat).read_text().splitlines())
        except (OSError, ValueError):
            continue
        return (None if bound == "max" else int(bound)), max(0, taken - int(rows.get(cache, 0)))
    return None, 0
