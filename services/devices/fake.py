"""Seeded devices for machines without a GPU: loads, memory, slices and loss on order, for tests; and to try
the pool's moves on a laptop, where what is bound to one runs on the CPU.

Law: no I/O; the same seed gives the same devices with the same loads. It keeps the door's contract, which the
contract suite checks on it as on the real ones.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

from regions.cli.errors import UsageError
from services.devices.door import Binding, Device, DeviceProcess, Slice, find, places, unknown
from services.faults import DeviceLost

GIB = 2**30
MOST = 64


class FakeDevices:
    """Devices. count devices of `memory` bytes; loads and memory in use are drawn from the seed until set.
    on_cpu: what is bound to one is to run on the CPU, for there is no GPU behind it."""

    kind = "fake"

    def __init__(
        self, seed: int = 0, count: int = 2, memory: int = 80 * GIB, *, on_cpu: bool = False
    ) -> None:
        self._on_cpu = on_cpu
        rng = Random(seed)  # noqa: S311 (a fake, seeded on purpose)
        self._devices = {
            device.uuid: device
            for device in (
                Device(
                    index=index,
                    uuid=f"GPU-fake-{seed:04x}-{index}",
                    name="Fake GPU",
                    memory_total=memory,
                    memory_used=rng.randrange(memory // 4),
                    utilisation=round(rng.uniform(0.0, 0.8), 2),
                )
                for index in range(count)
            )
        }
        self._lost: set[str] = set()

    def list(self) -> tuple[Device, ...]:
        return tuple(device for uuid, device in self._devices.items() if uuid not in self._lost)

    def bind(self, uuid: str) -> Binding:
        if uuid in self._lost:
            raise DeviceLost(f"{uuid} has fallen off the bus")
        device = find(self.list(), uuid)
        if device is None or device.slices:
            raise unknown(uuid, places(self.list()))
        if self._on_cpu:
            return Binding(uuid, "cpu", {"CUDA_VISIBLE_DEVICES": ""})
        return Binding(uuid, f"cuda:{device.index}", {"CUDA_VISIBLE_DEVICES": uuid})

    def close(self) -> None:
        """It holds nothing."""

    def set_load(self, uuid: str, load: float | None) -> None:
        self._change(uuid, utilisation=load)

    def set_used(self, uuid: str, used: int) -> None:
        self._change(uuid, memory_used=used)

    def take(self, uuid: str, amount: int, pid: int = 1) -> None:
        """A process takes memory (or, negative, gives it back)."""
        device = self._devices[uuid]
        held = {p.pid: p.memory for p in device.processes}
        held[pid] = held.get(pid, 0) + amount
        rows = tuple(DeviceProcess(p, m) for p, m in held.items() if m > 0)
        self._change(uuid, memory_used=device.memory_used + amount, processes=rows)

    def cut(self, uuid: str, parts: int) -> None:
        """MIG on: `parts` equal slices, all empty. How busy the whole is can then not be told."""
        share = self._devices[uuid].memory_total // parts
        name = f"1g.{share // GIB}gb"
        slices = tuple(Slice(f"MIG-{uuid}-{n}", name, share, 0) for n in range(parts))
        self._change(uuid, slices=slices, utilisation=None)

    def lose(self, uuid: str) -> None:
        """It falls off the bus: no longer listed, and binding to it is a DeviceLost."""
        self._lost.add(uuid)

    def back(self, uuid: str) -> None:
        self._lost.discard(uuid)

    def _change(self, uuid: str, **fields: object) -> None:
        self._devices[uuid] = replace(self._devices[uuid], **fields)  # type: ignore[arg-type]


def pretended(text: str) -> FakeDevices:
    """`fake:SEED[:COUNT]` as devices. Raises UsageError."""
    kind, *numbers = text.split(":")
    if kind != "fake" or not 1 <= len(numbers) <= 2 or not all(n.isdecimal() and len(n) < 6 for n in numbers):
        raise UsageError(f"--devices {text!r}", "not fake:SEED[:COUNT]", "for example fake:7:3")
    seed, count = int(numbers[0]), int(numbers[1]) if len(numbers) > 1 else 2
    if not 1 <= count <= MOST:
        raise UsageError(f"--devices {text!r}", f"{count} devices", f"from 1 to {MOST}")
    return FakeDevices(seed, count, on_cpu=True)
