"""Where a sleeper wakes: at home, or on the least loaded device when its own is too busy, full or gone.

Law: pure; loads are shares 0..1, memory is bytes. Every answer has a reason, staying too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from services.devices.door import MIG, Device

BUSY = 0.85
RESERVE = 0.02
"""Share of a device's memory that is left alone: a device filled to the last byte fails in its next step."""


@dataclass(frozen=True, slots=True)
class Choice:
    """device: uuid to wake on. moved: it is not where it slept. reason: for people."""

    device: str
    moved: bool
    reason: str


class NoRoom(RuntimeError):
    """No device has the memory; nothing was touched."""


def room(device: Device) -> int:
    """Bytes that may be taken on it."""
    return max(0, device.memory_free - int(device.memory_total * RESERVE))


def fits(device: Device, need: int) -> bool:
    """One that needs nothing fits even where nothing is left."""
    return need <= 0 or need <= room(device)


def reachable(own: str, seen: Iterable[Device], *, slices: bool) -> tuple[Device, ...]:
    """Where an engine may go. slices: into and out of a MIG slice too; a process that holds a slice itself
    sees that one alone, for ever, and one that doesn't sees none."""
    return tuple(
        d for d in seen if slices or d.uuid == own or not (d.uuid.startswith(MIG) or own.startswith(MIG))
    )


def choose(own: str, places: Iterable[Device], need: int, busy: float = BUSY) -> Choice:
    """Where an instance that slept on `own` wakes, taking `need` bytes (0: not known).

    Home while it is at most `busy` and has the memory. Else the least loaded of the others that is at most
    `busy` and has it. Else home, busy as it is, if the memory is there. Raises NoRoom.
    """
    seen = tuple(places)
    home = next((device for device in seen if device.uuid == own), None)
    if home is not None and home.load <= busy and fits(home, need):
        return Choice(own, False, f"{own} is {home.load:.0%} busy and has room")
    why = _why_not(own, home, need, busy)
    others = [d for d in seen if d.uuid != own and d.load <= busy and fits(d, need)]
    if others:
        best = min(others, key=lambda d: (d.load, d.index, d.uuid))
        return Choice(best.uuid, True, f"{why}; {best.uuid} is {best.load:.0%} busy, the least")
    if home is not None and fits(home, need):
        return Choice(own, False, f"{why}, and no other device of {len(seen)} is free: it stays")
    # A device that is lost must be left, even for a busy one.
    busy_ones = [d for d in seen if d.uuid != own and fits(d, need)]
    if home is None and busy_ones:
        best = min(busy_ones, key=lambda d: (d.load, d.index, d.uuid))
        return Choice(best.uuid, True, f"{why}; {best.uuid} is {best.load:.0%} busy, the least of busy ones")
    free = max((room(d) for d in seen), default=0)
    raise NoRoom(f"{why}; waking needs {need / 2**20:.0f} MiB, at most {free / 2**20:.0f} MiB are free")


def _why_not(own: str, home: Device | None, need: int, busy: float) -> str:
    if home is None:
        return f"{own or 'its device'} is gone"
    if home.load > busy:
        return f"{own} is {home.load:.0%} busy (over {busy:.0%})"
    return f"{own} has {room(home) / 2**20:.0f} MiB free"
