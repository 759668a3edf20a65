"""GPUs over NVML (nvidia-ml-py) behind the door.

Law: the only file that calls NVML, and every call goes through `_Calls`: there its errors become ours. A
machine without the library or the driver has no GPUs; that is an answer and no error. Read only: nothing of a
device is ever set, MIG included.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import MappingProxyType
from typing import Any

from regions.cli.errors import WeirError
from services.devices.door import MIG, Binding, Device, DeviceProcess, Slice, find, places, unknown, visible
from services.faults import DeviceLost

NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND, DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND = 3, 4, 6, 9, 12
FUNCTION_NOT_FOUND, GPU_IS_LOST, RESET_REQUIRED, UNKNOWN = 13, 15, 16, 999
"""nvmlReturn_t, as nvml.h has them."""

_NO_GPU = (DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND)
_LOST = (GPU_IS_LOST, RESET_REQUIRED, UNKNOWN)
_UNTOLD = (NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND, FUNCTION_NOT_FOUND)
MIG_ON = 1


class NoGpu(WeirError):
    """There is no NVML here, or no driver under it."""


class _Calls:
    """NVML with our errors. nvml: the module pynvml, or what stands in for it in a test."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml

    def must(self, name: str, *args: Any) -> Any:
        """Raises DeviceLost, NoGpu, or WeirError for whatever else NVML says."""
        try:
            return getattr(self._nvml, name)(*args)
        except self._nvml.NVMLError as error:
            code = int(error.value)
            if code in _LOST:
                raise DeviceLost(f"{name}: {error}") from error
            if code in _NO_GPU:
                raise NoGpu("NVML", str(error), "install the driver, or serve on the CPU") from error
            raise WeirError("NVML", f"{name}: {error}", "see what nvidia-smi says") from error

    def may(self, name: str, *args: Any) -> Any:
        """As `must`, but None where this device or driver can't tell."""
        try:
            return self.must(name, *args)
        except WeirError as error:
            cause = error.__cause__
            if int(getattr(cause, "value", UNKNOWN)) in _UNTOLD:
                return None
            raise


class NvmlDevices:
    """Devices. Raises NoGpu when made where there is none. allowed: CUDA_VISIBLE_DEVICES of this process,
    which NVML itself doesn't heed."""

    kind = "nvml"

    def __init__(self, nvml: Any = None, allowed: str | None = None) -> None:
        self._allowed = allowed
        self._call = _Calls(nvml if nvml is not None else import_module("pynvml"))
        self._call.must("nvmlInit")
        self._open = True

    def list(self) -> tuple[Device, ...]:
        """GPUs in the driver's order. One that is lost is left out: the others serve on."""
        return visible(self._each(self._device), self._allowed)

    def bind(self, uuid: str) -> Binding:
        """CUDA_VISIBLE_DEVICES takes UUIDs of GPUs and of MIG slices alike."""
        seen = self.list()
        device = find(seen, uuid)
        if device is None:
            if uuid in self._lost():
                raise DeviceLost(f"{uuid} has fallen off the bus")
            raise unknown(uuid, seen)
        if device.slices:
            raise unknown(uuid, places(seen))
        environment = {"CUDA_VISIBLE_DEVICES": uuid, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        # A process may use one MIG slice at most, and sees it as its only device.
        torch = "cuda:0" if uuid.startswith(MIG) else f"cuda:{self._number(seen, device)}"
        return Binding(uuid, torch, MappingProxyType(environment))

    def _number(self, seen: tuple[Device, ...], device: Device) -> int:
        """Among those that this process may use; a lost one keeps its number."""
        return device.index if self._allowed is None else seen.index(device)

    def close(self) -> None:
        if self._open:
            self._open = False
            self._call.must("nvmlShutdown")

    def _each(self, read: Callable[[int, Any], Device]) -> tuple[Device, ...]:
        found = []
        for index in range(self._call.must("nvmlDeviceGetCount")):
            try:
                found.append(read(index, self._call.must("nvmlDeviceGetHandleByIndex", index)))
            except DeviceLost:
                continue
        return tuple(found)

    def _lost(self) -> set[str]:
        """UUIDs that the driver still knows of devices that no longer answer."""
        found = set()
        for index in range(self._call.must("nvmlDeviceGetCount")):
            try:
                handle = self._call.must("nvmlDeviceGetHandleByIndex", index)
                uuid = _text(self._call.must("nvmlDeviceGetUUID", handle))
            except DeviceLost:
                continue
            try:
                self._device(index, handle)
            except DeviceLost:
                found.add(uuid)
        return found

    def _device(self, index: int, handle: Any) -> Device:
        memory = self._call.must("nvmlDeviceGetMemoryInfo", handle)
        busy = self._call.may("nvmlDeviceGetUtilizationRates", handle)
        return Device(
            index=index,
            uuid=_text(self._call.must("nvmlDeviceGetUUID", handle)),
            name=_text(self._call.must("nvmlDeviceGetName", handle)),
            memory_total=int(memory.total),
            memory_used=int(memory.used),
            utilisation=None if busy is None else min(1.0, int(busy.gpu) / 100),
            slices=self._slices(handle),
            processes=self._processes(handle),
        )

    def _slices(self, handle: Any) -> tuple[Slice, ...]:
        mode = self._call.may("nvmlDeviceGetMigMode", handle)
        if mode is None or mode[0] != MIG_ON:
            return ()
        count = self._call.may("nvmlDeviceGetMaxMigDeviceCount", handle) or 0
        parts = (self._call.may("nvmlDeviceGetMigDeviceHandleByIndex", handle, i) for i in range(count))
        return tuple(self._slice(part) for part in parts if part is not None)

    def _slice(self, part: Any) -> Slice:
        memory = self._call.must("nvmlDeviceGetMemoryInfo", part)
        name = _text(self._call.may("nvmlDeviceGetName", part) or "")
        return Slice(
            uuid=_text(self._call.must("nvmlDeviceGetUUID", part)),
            # "NVIDIA H100 80GB HBM3 MIG 1g.10gb": the profile is what tells slices apart.
            name=name.rpartition("MIG ")[2],
            memory_total=int(memory.total),
            memory_used=int(memory.used),
            processes=self._processes(part),
        )

    def _processes(self, handle: Any) -> tuple[DeviceProcess, ...]:
        rows = self._call.may("nvmlDeviceGetComputeRunningProcesses", handle) or ()
        return tuple(DeviceProcess(int(row.pid), int(row.usedGpuMemory or 0)) for row in rows)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
