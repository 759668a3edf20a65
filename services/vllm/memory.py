"""How much memory a server holds, and how much its device has left.

Law: looks, changes nothing; milliseconds, so from a loop it is called in a thread. On a GPU what the driver
says of the server's processes, or of the whole device where it names none (containers); on a CPU the resident
memory of the server's processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import psutil

from services.devices.door import Device, Devices, places


@dataclass(frozen=True, slots=True)
class Level:
    """Bytes. free: of the device; None where nobody can say what would stop a server from growing."""

    held: int
    free: int | None = None


def tree(pid: int) -> list[psutil.Process]:
    """A process and all below it; empty when it is gone."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.Error:
        return []


def resident(pid: int) -> int:
    """Bytes of memory that a process and all below it hold."""
    held = 0
    for process in tree(pid):
        try:
            held += process.memory_info().rss
        except psutil.Error:
            continue  # it has ended meanwhile
    return held


def on_host(pid: int) -> Level:
    return Level(resident(pid), psutil.virtual_memory().available)


def on_device(pid: int, devices: Iterable[Device], uuid: str) -> Level:
    """uuid: of the device that the server runs on, empty for the first."""
    here = [device for device in devices if uuid in ("", device.uuid)]
    if not here:
        return Level(0)
    device = here[0]
    ours = {process.pid for process in tree(pid)}
    told = sum(process.memory for process in device.processes if process.pid in ours)
    return Level(told or device.memory_used, device.memory_free)


def meter(gpu: bool, uuid: str, open_devices: Callable[[], Devices]) -> Callable[[int], Level]:
    """What tells the level of the server below a pid. open_devices: of this machine's GPUs; opened once."""
    if not gpu:
        return on_host
    devices = open_devices()
    return lambda pid: on_device(pid, places(devices.list()), uuid)
