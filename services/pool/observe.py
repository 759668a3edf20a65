"""What this process really holds, as the kernel and the driver count it: its engine's figures prove nothing.

Law: reads only. Blocks for milliseconds; call it in a thread. Child processes (vLLM's) count as ours.
"""

from __future__ import annotations

from dataclasses import dataclass

import psutil

from regions.cli.errors import WeirError
from services.devices.door import Devices, find
from services.faults import DeviceLost

MIB = 2**20
UNTOLD = 0.5
"""Least share that an engine gives back which doesn't say what it holds: a CUDA context and graphs stay."""


@dataclass(frozen=True, slots=True)
class Held:
    """resident: bytes of host memory. device: bytes on the device, None where the driver doesn't say whose
    memory is whose (the CPU; some containers)."""

    resident: int
    device: int | None = None


def observe(devices: Devices | None, uuid: str) -> Held:
    """Of this process and its children, now. A device that can't be read tells nothing."""
    own = psutil.Process()
    family = [own, *own.children(recursive=True)]
    resident = 0
    for process in family:
        try:
            resident += process.memory_info().rss
        except psutil.Error:
            continue
    return Held(resident, _on_device(devices, uuid, {process.pid for process in family}))


def _on_device(devices: Devices | None, uuid: str, pids: set[int]) -> int | None:
    try:
        device = find(devices.list(), uuid) if devices is not None else None
    except (WeirError, DeviceLost):
        return None
    rows = [p.memory for p in device.processes if p.pid in pids] if device is not None else []
    return sum(rows) or None


def contradiction(claimed: int, before: Held, after: Held, least: float) -> str:
    """Why the driver's count contradicts an engine that says it gave `claimed` bytes back (0: it says
    nothing), or empty."""
    if before.device is None:
        return ""
    given = before.device - (after.device or 0)
    if given >= (least * claimed if claimed else UNTOLD * before.device):
        return ""
    if not claimed:
        return f"the driver says that {given / MIB:.0f} of {before.device / MIB:.0f} MiB were given back"
    return (
        f"the engine says it gave {claimed / MIB:.0f} MiB back, the driver says {given / MIB:.0f} MiB: "
        f"it holds {(after.device or 0) / MIB:.0f} MiB still"
    )


def told(before: Held, after: Held) -> str:
    text = f"resident {before.resident / MIB:.0f} → {after.resident / MIB:.0f} MiB"
    if before.device is None:
        return text
    return f"{text}, on the device {before.device / MIB:.0f} → {(after.device or 0) / MIB:.0f} MiB"
