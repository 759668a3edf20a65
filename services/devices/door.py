"""The door to devices: what an instance may know of the thing it runs on, and how it is bound to it.

Law: types and pure answers about them. Bytes are bytes, loads are shares 0..1. An implementation does
blocking calls of milliseconds; from a loop, call it in a thread. A device that is gone is a DeviceLost
(services/faults.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Protocol, runtime_checkable

from regions.cli.errors import UsageError

MIG = "MIG-"
"""How the UUID of a slice begins."""


@dataclass(frozen=True, slots=True)
class DeviceProcess:
    """A process that holds memory of a device. memory: 0 where the driver doesn't say (containers)."""

    pid: int
    memory: int = 0


@dataclass(frozen=True, slots=True)
class Slice:
    """One MIG slice: a device of its own to whoever is bound to it. name: its profile ("1g.18gb")."""

    uuid: str
    name: str
    memory_total: int
    memory_used: int
    processes: tuple[DeviceProcess, ...] = ()

    @property
    def memory_free(self) -> int:
        return max(0, self.memory_total - self.memory_used)


@dataclass(frozen=True, slots=True)
class Device:
    """One device. uuid: its name on this host, stable over restarts. utilisation: share of the last moment in
    which it was busy; None where it can't be told (a GPU cut into MIG slices). slices: empty without MIG.
    """

    index: int
    uuid: str
    name: str
    memory_total: int
    memory_used: int
    utilisation: float | None
    slices: tuple[Slice, ...] = ()
    processes: tuple[DeviceProcess, ...] = ()

    @property
    def memory_free(self) -> int:
        return max(0, self.memory_total - self.memory_used)

    @property
    def load(self) -> float:
        """How busy, 0..1; where nothing says, the share of its memory that is in use."""
        if self.utilisation is not None:
            return self.utilisation
        return self.memory_used / self.memory_total if self.memory_total else 0.0


@dataclass(frozen=True, slots=True)
class Binding:
    """Where an engine is to run. uuid: of the device or slice, "" for wherever it likes. torch: its name in
    a process that sees all devices ("cpu", "cuda:1"). environment: for a child process that sees this one
    alone."""

    uuid: str = ""
    torch: str = ""
    environment: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


ANYWHERE = Binding()


@runtime_checkable
class Devices(Protocol):
    """kind: "nvml", "host" or "fake"."""

    kind: str

    def list(self) -> tuple[Device, ...]:
        """All devices that answer now, by index. Raises DeviceLost when the driver is gone as a whole."""

    def bind(self, uuid: str) -> Binding:
        """Raises UsageError for an unknown device, DeviceLost for one that is gone."""

    def close(self) -> None:
        """Fine to call twice."""


def find(devices: Iterable[Device], uuid: str) -> Device | None:
    """The device, or the device that a slice's uuid is a part of, seen as that slice."""
    for device in devices:
        if device.uuid == uuid:
            return device
        for part in device.slices:
            if part.uuid == uuid:
                return as_device(device, part)
    return None


def as_device(whole: Device, part: Slice) -> Device:
    """A slice as a device of its own; how busy it is, NVML doesn't tell."""
    name = f"{whole.name} {part.name}"
    return Device(whole.index, part.uuid, name, part.memory_total, part.memory_used, None, (), part.processes)


def places(devices: Iterable[Device]) -> tuple[Device, ...]:
    """What can be bound to: slices instead of a GPU that is cut into them."""
    found: list[Device] = []
    for device in devices:
        found += [as_device(device, part) for part in device.slices] or [device]
    return tuple(found)


def unknown(uuid: str, devices: Iterable[Device]) -> UsageError:
    known = ", ".join(device.uuid for device in places(devices)) or "none"
    return UsageError(f"device {uuid!r}", "unknown on this host", f"known: {known} (weir device list)")


def visible(devices: Iterable[Device], allowed: str | None) -> tuple[Device, ...]:
    """The devices that CUDA_VISIBLE_DEVICES leaves, in its order: the n-th is cuda:n in this process.

    allowed: None for no limit; else numbers (in PCI order) or (beginnings of) UUIDs, of slices too. As CUDA
    does it, the first that names none ends the list.
    """
    seen = tuple(devices)
    if allowed is None:
        return seen
    found: list[Device] = []
    for word in (part.strip() for part in allowed.split(",")):
        match = [d for d in seen if word and (word == str(d.index) or d.uuid.startswith(word))]
        parts = [(d, s) for d in seen for s in d.slices if word and s.uuid.startswith(word)]
        match = match or [replace(d, slices=(s,)) for d, s in parts]
        if len(match) != 1 or match[0] in found:
            break
        found += match
    return tuple(found)
