"""A stand-in for the module pynvml: answers as H200s give them, and NVML's errors on order.

Law: only the calls and attributes that services/devices/nvml.py may use; another one is an AttributeError, so
that a new call can't slip in untested. Written after nvml.h and pynvml itself, not recorded on a
GPU. `fail` maps (function, uuid or "") to an NVML return code.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

GIB = 2**30


class NVMLError(Exception):
    """As pynvml has it: the code in `value`."""

    def __init__(self, value: int) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


@dataclass
class Part:
    """A GPU, or a MIG slice of one (then `slices` is None). busy: percent, None: not supported."""

    uuid: str
    name: str
    total: int
    used: int
    busy: int | None
    slices: list[Part | None] | None = None
    processes: list[tuple[int, int | None]] = field(default_factory=list)


def h200(number: int, **changes: Any) -> Part:
    """As an H200 answers."""
    uuid = f"GPU-5d6f0c1e-0000-4000-8000-{number:012x}"
    fields: dict[str, Any] = {"name": "NVIDIA H200", "total": 150_754_820_096, "used": 500 * 2**20, "busy": 0}
    return Part(uuid, **(fields | changes))


def cut(number: int) -> Part:
    """An H200 with MIG on: two slices of seven places, busy not to be told."""
    name = "NVIDIA H200 MIG 3g.71gb"
    slices: list[Part | None] = [
        Part(f"MIG-{number}-a", name, 71 * GIB, 1 * GIB, None, processes=[(4321, 1 * GIB)]),
        None,
        Part(f"MIG-{number}-b", "NVIDIA H200 MIG 1g.18gb", 17 * GIB, 0, None),
        *[None] * 4,
    ]
    return h200(number, busy=None, slices=slices)


class RecordedNvml:
    """gpus: in the driver's order. MIG is off where `slices` is None."""

    NVMLError = NVMLError

    def __init__(self, *gpus: Part) -> None:
        self.gpus = list(gpus)
        self.fail: dict[tuple[str, str], int] = {}
        self.calls: list[str] = []
        self.open = 0

    def _called(self, name: str, part: Part | None = None) -> None:
        self.calls.append(name)
        for key in ((name, part.uuid if part else ""), (name, ""), ("*", part.uuid if part else "-")):
            if key in self.fail:
                raise NVMLError(self.fail[key])

    def nvmlInit(self) -> None:
        self._called("nvmlInit")
        self.open += 1

    def nvmlShutdown(self) -> None:
        self._called("nvmlShutdown")
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        self._called("nvmlDeviceGetCount")
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Part:
        self._called("nvmlDeviceGetHandleByIndex")
        return self.gpus[index]

    def nvmlDeviceGetUUID(self, part: Part) -> str:
        self._called("nvmlDeviceGetUUID")
        return part.uuid

    def nvmlDeviceGetName(self, part: Part) -> str:
        self._called("nvmlDeviceGetName", part)
        return part.name

    def nvmlDeviceGetMemoryInfo(self, part: Part) -> Any:
        self._called("nvmlDeviceGetMemoryInfo", part)
        return SimpleNamespace(total=part.total, used=part.used, free=part.total - part.used)

    def nvmlDeviceGetUtilizationRates(self, part: Part) -> Any:
        self._called("nvmlDeviceGetUtilizationRates", part)
        if part.busy is None:
            raise NVMLError(3)
        return SimpleNamespace(gpu=part.busy, memory=0)

    def nvmlDeviceGetMigMode(self, part: Part) -> list[int]:
        self._called("nvmlDeviceGetMigMode", part)
        return [int(part.slices is not None)] * 2

    def nvmlDeviceGetMaxMigDeviceCount(self, part: Part) -> int:
        self._called("nvmlDeviceGetMaxMigDeviceCount", part)
        return len(part.slices or ())

    def nvmlDeviceGetMigDeviceHandleByIndex(self, part: Part, index: int) -> Part:
        self._called("nvmlDeviceGetMigDeviceHandleByIndex", part)
        found = (part.slices or [])[index]
        if found is None:
            raise NVMLError(6)
        return found

    def nvmlDeviceGetComputeRunningProcesses(self, part: Part) -> list[Any]:
        self._called("nvmlDeviceGetComputeRunningProcesses", part)
        return [SimpleNamespace(pid=pid, usedGpuMemory=memory) for pid, memory in part.processes]
