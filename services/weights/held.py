"""Weights held in memory, whatever the device: the one interface that engines see.

Law: chooses how the weights are held; loading and parking are done by others.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch

from regions.cli.errors import UsageError
from services.weights.load import Report
from services.weights.meter import Progress


class Weights(Protocol):
    """Loaded weights. Calls block (tens of milliseconds to seconds); one at a time."""

    report: Report
    """How loading went."""

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """By the names in the files. The objects stay the same for the life of this; their contents are not
        to be read between `park` or `drop` and `unpark` or `reload`. On a GPU their address may change
        meanwhile: a CUDA graph that holds it is to be captured anew.
        """

    @property
    def nbytes(self) -> int:
        """Size of all tensors in the run dtype."""

    def park(self) -> None:
        """Level 1: give the device's memory back, keep what makes `unpark` fast. Fine to call twice."""

    def unpark(self) -> None:
        """Undo `park`; nothing to do when awake. Raises WakeFailed and stays parked."""

    def drop(self) -> None:
        """Level 2: keep nothing in memory but the names, here or elsewhere on the host."""

    def reload(self) -> None:
        """Undo `drop` (or `park`), checking the weights anew. Raises WakeFailed or WeightsError, stays so."""

    def resident_bytes(self) -> int:
        """Bytes of the device's memory held now; on the CPU, of this process."""

    def close(self) -> None:
        """Give everything back. Fine to call twice. The tensors are not to be read afterwards."""


def open_held(folder: Path, *, device: str, dtype: str, progress: Progress | None) -> Weights:
    """See services.weights.open_weights."""
    kind = device.partition(":")[0]
    if kind == "cpu":
        from services.weights.host import HostWeights

        return HostWeights(folder, dtype, progress)
    if kind == "cuda":
        from services.weights.device import DeviceWeights

        return DeviceWeights(folder, device, dtype, progress)
    raise UsageError(f"device {device!r}", "weights are held on cpu or cuda", "cpu, cuda, cuda:0, ...")
