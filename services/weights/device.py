"""Weights in the memory of a GPU: one storage, given back while parked, its copy kept in pinned host memory.

Law: all tensors are views of one storage that is emptied and filled again, so that they stay the same
objects; their address may change. Works on device "cpu" too, without pinning: that is how it is tested
without a GPU.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import torch

from mesh.clock import Clock, SystemClock
from regions.cli.errors import WeirError
from services.faults import WakeFailed
from services.weights import gpudirect
from services.weights.folder import read_folder
from services.weights.layout import Layout, layout, run_dtype
from services.weights.load import TORCH, Report, load
from services.weights.meter import Progress

log = logging.getLogger("weir.weights")


class DeviceWeights:
    """Weights on `device` (services/weights/held.py). `report` says how loading went."""

    def __init__(
        self,
        folder: Path,
        device: str,
        dtype: str,
        progress: Progress | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Loads. Raises WeightsError, UsageError; WeirError when the device has no room."""
        self._folder = read_folder(folder)
        self._device = torch.device(device)
        self._clock = clock or SystemClock()
        self._layout = layout(self._folder.facts, run_dtype(dtype))
        try:
            self._whole = torch.empty(self._layout.size, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError as error:
            way_out = (
                "give another device or dtype=bfloat16, or put another instance to sleep (weir pool sleep)"
            )
            why = f"no room for {self._layout.size >> 20} MiB of weights: {str(error).splitlines()[0]}"
            raise WeirError(device, why, way_out) from error
        self._tensors = _views(self._whole, self._layout)
        self._copy: torch.Tensor | None = None
        self.report = self._read(progress)

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        return self._tensors

    @property
    def nbytes(self) -> int:
        return self._layout.nbytes

    def park(self) -> None:
        """Raises RuntimeError when the host has no memory for the copy; nothing is lost then."""
        if self._held == 0:
            return
        copy = torch.empty(self._layout.size, dtype=torch.uint8, pin_memory=self._cuda)
        copy.copy_(self._whole)
        self._copy = copy
        self._free()

    def drop(self) -> None:
        self._copy = None
        self._free()

    def unpark(self) -> None:
        if self._held:
            return
        if self._copy is None:
            self.reload()
            return
        self._take()
        try:
            self._whole.copy_(self._copy)
        except RuntimeError as error:
            self._free()
            raise WakeFailed(f"the weights can't be copied to {self._device}: {error}") from error
        self._copy = None

    def reload(self) -> None:
        if self._held:
            return
        self._take()
        try:
            self.report = self._read(None)
        except BaseException:
            # Half of them would pass for all of them at the next wake.
            self._free()
            raise
        self._copy = None

    def resident_bytes(self) -> int:
        return self._held

    def close(self) -> None:
        self._tensors = {}
        self.drop()

    @property
    def _cuda(self) -> bool:
        return self._device.type == "cuda"

    @property
    def _held(self) -> int:
        return self._whole.untyped_storage().nbytes()

    def _take(self) -> None:
        try:
            self._whole.untyped_storage().resize_(self._layout.size)
        except RuntimeError as error:
            size = self._layout.size >> 20
            raise WakeFailed(f"no room for {size} MiB of weights on {self._device}: {error}") from error

    def _free(self) -> None:
        self._whole.untyped_storage().resize_(0)
        if self._cuda:
            torch.cuda.synchronize(self._device)
            # Back to the driver: other instances on this device are to have it, not our own allocator.
            torch.cuda.empty_cache()

    def _read(self, progress: Progress | None) -> Report:
        if self._cuda and gpudirect.usable(self._device.index or 0):
            try:
                return gpudirect.load(self._folder, self._tensors, self._device, progress, self._clock)
            except gpudirect.Unusable as why:
                log.warning("GPUDirect: %s; reading by way of the host", why)
        return load(self._folder, self._tensors, progress=progress, clock=self._clock)


def _views(whole: torch.Tensor, plan: Layout) -> dict[str, torch.Tensor]:
    return {
        name: whole[p.offset : p.offset + p.nbytes].view(TORCH[p.dtype]).view(p.shape)
        for name, p in plan.places.items()
    }
