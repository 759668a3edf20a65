"""Weights in host memory: mapped from a parked file where there can be one, else in anonymous memory.

Law: one state, "awake" or not; tensors are views of one arena for its whole life.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from mesh.clock import Clock, SystemClock
from mesh.tools import cache_dir
from services.faults import WakeFailed
from services.weights import parked
from services.weights.arena import FileArena, HostArena
from services.weights.folder import read_folder
from services.weights.layout import Layout, layout, run_dtype
from services.weights.load import TORCH, Report, load
from services.weights.meter import Meter, Progress
from services.weights.parked import Cache, Parked, Unsound

log = logging.getLogger("weir.weights")

PARK_FROM = 16 << 20
"""Weights smaller than this get no file of their own: reading their shards again takes as long."""


def views(arena: FileArena | HostArena, plan: Layout) -> dict[str, torch.Tensor]:
    """Every tensor of the layout."""
    return {name: arena.tensor(TORCH[p.dtype], p.shape, p.offset) for name, p in plan.places.items()}


class HostWeights:
    """Weights on the CPU (services/weights/held.py). `report` says how loading went."""

    def __init__(
        self,
        folder: Path,
        dtype: str,
        progress: Progress | None = None,
        *,
        clock: Clock | None = None,
        park_from: int = PARK_FROM,
    ) -> None:
        """Loads. Raises WeightsError, UsageError."""
        self._folder, self._dtype = folder, dtype
        self._clock = clock or SystemClock()
        self._awake = True
        self._resident: int | None = None
        self._change, self._telling = 0, threading.Lock()
        self._files = read_folder(folder)
        self._layout = layout(self._files.facts, run_dtype(dtype))
        self.nbytes = self._layout.nbytes
        self.report = Report("shards", 0, 0.0, False)
        self._parked = self._try_mapped(progress) if self._layout.size >= park_from else None
        self._arena: FileArena | HostArena
        if self._parked is not None:
            self._arena = self._parked.arena
        else:
            self._arena = HostArena(self._layout.size, dense=True)
            self._read(self._arena, progress)
        self._tensors = views(self._arena, self._layout)

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        return self._tensors

    def park(self) -> None:
        """Tens of milliseconds at most, whatever the size."""
        self._arena.release()
        self._changed(awake=False)

    def drop(self) -> None:
        """The page cache lets them go too, unless another process uses the same file."""
        if isinstance(self._arena, FileArena):
            self._arena.forget()
        self.park()

    def unpark(self) -> None:
        self._wake(self._fill)

    def reload(self) -> None:
        self._wake(self._fill_checked)

    def resident_bytes(self) -> int:
        """Asked of the kernel once after a change: it takes a millisecond, and metrics ask all the time."""
        found, change = self._resident, self._change
        if found is None:
            found = self._measured()
            with self._telling:
                # Who asks isn't who changes: what was measured before a change must not be told after it.
                if change == self._change:
                    self._resident = found
        return found

    def _measured(self) -> int:
        try:
            return self._arena.resident_bytes()
        except OSError as error:
            log.warning("nobody can tell what is in memory (%s): the size of the weights is reported", error)
            return self._layout.size if self._awake else 0

    def close(self) -> None:
        self._tensors = {}
        self._arena.close()
        if self._parked is not None:
            self._parked.close()
        self._changed(awake=False)

    def _wake(self, fill: Callable[[], None]) -> None:
        if self._awake:
            return
        try:
            fill()
        except BaseException as error:
            self._arena.release()
            self._changed(awake=False)
            if isinstance(error, (OSError, Unsound)):
                what = f"the weights of {self._folder.name}"
                raise WakeFailed(f"{what} can't be brought back: {error}") from error
            raise
        self._changed(awake=True)

    def _changed(self, *, awake: bool) -> None:
        """Called after the change."""
        with self._telling:
            self._awake, self._resident, self._change = awake, None, self._change + 1

    def _fill(self) -> None:
        if isinstance(self._arena, FileArena):
            self._arena.unpark()
        else:
            self._read(self._arena, None)

    def _fill_checked(self) -> None:
        if self._parked is not None:
            self._parked.check(lambda _: None)
        else:
            self._read(self._arena, None)

    def _try_mapped(self, progress: Progress | None) -> Parked | None:
        try:
            return self._mapped(progress)
        except OSError as error:
            log.warning("weights can't be parked in a file (%s): waking will read the shards again", error)
            return None

    def _mapped(self, progress: Progress | None) -> Parked:
        """The parked file, checked, or made now. Raises OSError when there can be none."""
        cache = Cache(cache_dir() / "parked", parked.limit(os.environ))
        name = parked.key(self._files, self._dtype)
        found = cache.find(name, self._layout.size)
        if found is not None and self._sound(found, progress):
            return found
        with cache.writing():
            found = cache.find(name, self._layout.size)
            if found is not None and self._sound(found, progress):
                return found
            made = cache.write(name, self._layout.size, lambda arena: self._read(arena, progress))
            made.arena.unpark()
            return made

    def _sound(self, found: Parked, progress: Progress | None) -> bool:
        meter = Meter(f"{self._folder.name}, parked", self._layout.size, progress, self._clock)
        try:
            found.check(meter.add)
        except Unsound as why:
            log.warning("parked weights of %s: %s; writing them again", self._folder.name, why)
            found.close()
            return False
        self.report = Report("parked file", self._layout.size, meter.seconds, True)
        log.info("%s: %s", self._folder, self.report)
        return True

    def _read(self, arena: FileArena | HostArena, progress: Progress | None) -> None:
        self.report = load(self._files, views(arena, self._layout), progress=progress, clock=self._clock)
