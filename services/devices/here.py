"""The devices of this machine: GPUs where NVML finds some, else the CPU.

Law: chooses; does nothing else.
"""

from __future__ import annotations

from services.devices.door import Devices
from services.devices.host import HostDevices
from services.devices.nvml import NoGpu, NvmlDevices


def devices(want: str = "") -> Devices:
    """want: "cpu" for the CPU whatever there is, "gpu" for GPUs or NoGpu, "" for what is best.

    nvidia-ml-py need not be installed: without it there are no GPUs.
    """
    if want == "cpu":
        return HostDevices()
    try:
        return NvmlDevices()
    except (NoGpu, ModuleNotFoundError) as error:
        if want == "gpu":
            why = error.why if isinstance(error, NoGpu) else "nvidia-ml-py is not installed"
            raise NoGpu("GPUs", why, "install the driver and nvidia-ml-py, or serve on the CPU") from error
        return HostDevices()
