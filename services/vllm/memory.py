"""How much memory a server holds, and how much its device has left.

Law: looks, changes nothing; milliseconds, so from a loop it is called in a thread. On a GPU what the driver
says of the server's processes, or of the whole device where it names none (containers); on a CPU the resident
memory of the server's processes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import psutil

from services.devices.door import Device, places
from services.devices.nvml import NoGpu, NvmlDevices

log = logging.getLogger("weir.engine")


@dataclass(frozen=True, slots=True)
class Level:
    """Bytes. free: of the device; None where nobody can say what would stop a server from growing."""

    held: int
    free: int | None = None


Meter = Callable[[int], Level]


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


def on_gpu(uuid: str, pid: int) -> Level:
    """uuid: as for `on_device`. Raises DeviceLost, NoGpu."""
    devices = NvmlDevices()
    try:
        return on_device(pid, places(devices.list()), uuid)
    finally:
        devices.close()


def meter(gpu: bool, uuid: str) -> Meter:
    """What tells the level of the server below a pid. A GPU without NVML tells nothing: then what sleeping
    gave back can't be checked, only whether the server still answers as before."""
    if not gpu:
        return on_host
    try:
        NvmlDevices().close()
    except (NoGpu, ModuleNotFoundError) as error:
        log.warning("no NVML (%s): what vLLM gives back when it sleeps can't be measured", error)
        return lambda _: Level(0)
    return lambda pid: on_gpu(uuid, pid)
