"""The devices of this machine: GPUs where NVML finds some, else the CPU; and which one an engine starts on.

Law: chooses; does nothing else.
"""

from __future__ import annotations

import os

from services.devices.door import Binding, Devices, places, unknown
from services.devices.fake import pretended
from services.devices.host import CPU, HostDevices
from services.devices.nvml import NoGpu, NvmlDevices


def devices(want: str = "") -> Devices:
    """want: "cpu" for the CPU whatever there is, "gpu" for GPUs or NoGpu, "" for what is best.

    "fake:SEED[:COUNT]" for pretended ones. nvidia-ml-py need not be installed: without it there are no GPUs.
    """
    if want == "cpu":
        return HostDevices()
    if want.startswith("fake"):
        return pretended(want)
    try:
        return NvmlDevices(allowed=os.environ.get("CUDA_VISIBLE_DEVICES"))
    except (NoGpu, ModuleNotFoundError) as error:
        if want == "gpu":
            why = error.why if isinstance(error, NoGpu) else "nvidia-ml-py is not installed"
            raise NoGpu("GPUs", why, "install the driver and nvidia-ml-py, or serve on the CPU") from error
        return HostDevices()


def at_start(want: str, *, gpu: bool, fake: str = "") -> tuple[Devices, Binding]:
    """Where an engine starts. want: uuid of a device or slice, "cpu", torch's "cuda" or "cuda:1", or "" for
    the GPU with most memory free (the CPU where there is none or the engine has no use for one: gpu False).
    fake: "fake:SEED[:COUNT]" for pretended devices instead of the machine's, whatever the engine.

    Raises UsageError for an unknown device, NoGpu, DeviceLost.
    """
    if not fake and (want == CPU or not (want or gpu)):
        host = HostDevices()
        return host, host.bind(CPU)
    found = devices(fake or ("gpu" if want else ""))
    if want:
        return found, found.bind(_uuid(found, want))
    if not found.list():
        host = HostDevices()
        return host, host.bind(CPU)
    roomy = max(places(found.list()), key=lambda d: (d.memory_free, -d.index))
    return found, found.bind(roomy.uuid)


def _uuid(found: Devices, want: str) -> str:
    """The uuid behind torch's name for a device."""
    name, _, number = want.partition(":")
    if name != "cuda" or not (number or "0").isdecimal():
        return want
    seen = found.list()
    index = int(number or 0)
    if index >= len(seen):
        raise unknown(want, seen)
    return seen[index].uuid
