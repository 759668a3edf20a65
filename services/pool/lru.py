"""Who of the sleepers on a device goes cold: beyond the eight that slept last, the least recently used.

Law: pure. A sleeper is not used, so it was used last when it fell asleep. A device is one of one host, shared
by all services; those without a GPU share one device, the host's CPU and memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

MOST_ASLEEP = 8


@dataclass(frozen=True, slots=True)
class Sleeper:
    """instance: its id on its agent, of any service. slept_at: unix seconds. device: its name on `host`."""

    instance: str
    device: str
    slept_at: int
    host: str = ""


def to_cool(sleepers: Iterable[Sleeper], keep: int = MOST_ASLEEP) -> tuple[str, ...]:
    """Ids of the instances that must go cold, longest asleep first. The order doesn't depend on the order in
    which they are given: all instances that look at the same sleepers agree."""
    by_device: dict[tuple[str, str], list[Sleeper]] = {}
    for sleeper in sleepers:
        by_device.setdefault((sleeper.host, sleeper.device), []).append(sleeper)
    beyond: list[Sleeper] = []
    for rows in by_device.values():
        rows.sort(key=lambda s: (s.slept_at, s.instance))
        beyond += rows[: max(0, len(rows) - keep)]
    return tuple(s.instance for s in sorted(beyond, key=lambda s: (s.slept_at, s.instance)))
