"""Weights held in memory, whatever the device: the one interface that engines see.

Law: chooses how the weights are held; loading is done by others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import load_file

from services.weights.arena import ALIGN, HostArena
from services.weights.pages import up

Progress = Callable[[int, int], None]


class Weights(Protocol):
    """Loaded weights. Calls block (tens of milliseconds to seconds); one at a time."""

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """By the names in the files. The objects stay the same for the life of this; their contents are not
        to be read between `park` or `drop` and `unpark` or `reload`. On a GPU their address may change
        meanwhile.
        """

    @property
    def nbytes(self) -> int:
        """Size of all tensors in the run dtype."""

    def park(self) -> None:
        """Level 1: give the device's memory back, keep what makes `unpark` fast."""

    def unpark(self) -> None:
        """Undo `park`. Raises WakeFailed and stays parked."""

    def drop(self) -> None:
        """Level 2: keep nothing but the names."""

    def reload(self) -> None:
        """Undo `drop` (or `park`). Raises WeirError and stays dropped."""

    def resident_bytes(self) -> int:
        """Bytes of the device's memory held now (cpu: of this process)."""

    def close(self) -> None:
        """Give everything back. Fine to call twice."""


class _Simple:
    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self._folder, self._dtype = folder, dtype
        loaded: dict[str, torch.Tensor] = {}
        for path in sorted(folder.glob("*.safetensors")):
            loaded |= load_file(path)
        want = {n: dtype if t.is_floating_point() else t.dtype for n, t in loaded.items()}
        offsets, at = {}, 0
        for name, tensor in loaded.items():
            offsets[name], at = at, up(at + tensor.numel() * want[name].itemsize, ALIGN)
        self._arena = HostArena(at)
        self.tensors = {n: self._arena.tensor(want[n], t.shape, offsets[n]) for n, t in loaded.items()}
        self.nbytes = sum(t.nbytes for t in self.tensors.values())
        self._fill(loaded)

    def _fill(self, loaded: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in loaded.items():
            self.tensors[name].copy_(tensor)

    def park(self) -> None:
        self._arena.release()

    drop = park

    def unpark(self) -> None:
        loaded: dict[str, torch.Tensor] = {}
        for path in sorted(self._folder.glob("*.safetensors")):
            loaded |= load_file(path)
        self._fill(loaded)

    reload = unpark

    def resident_bytes(self) -> int:
        return self._arena.resident_bytes()

    def close(self) -> None:
        self._arena.close()


def open_held(folder: Path, *, device: str, dtype: str, progress: Progress | None) -> Weights:
    """See services.weights.open_weights."""
    held = _Simple(folder, getattr(torch, dtype))
    if progress is not None:
        progress(held.nbytes, held.nbytes)
    return held
