"""One model on one device: config, tokenizer, weights; awake, parked or dropped.

Law: shared by the engines that run it (cached and layer-wise), all in one event loop; nobody parks the
weights under another. `open`, `leave`, `park` and `unpark` block and belong into a worker's thread.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from functools import cached_property
from pathlib import Path
from typing import Protocol

import psutil
import torch

from regions.cli.errors import UsageError, WeirError
from services.faults import WakeFailed
from services.llama.config import LlamaConfig, from_hf
from services.llama.settings import AUTO, Settings
from services.llama.tokenizer import Tokenizer, load, read_json
from services.weights import open_weights
from services.weights.held import Weights

log = logging.getLogger("weir.torch")


class User(Protocol):
    """An engine on these weights."""

    @property
    def open(self) -> int:
        """Requests under way."""

    async def settle(self) -> None:
        """Returns between two steps, with everything cancelled gone."""


class Model:
    """folder: as in the model store. Nothing is loaded until `open`, which may be called again."""

    def __init__(self, name: str, folder: Path, settings: Settings) -> None:
        """Reads config.json only. Raises UsageError for a model that isn't ours."""
        self.name, self.folder, self.settings = name, folder, settings
        self.config: LlamaConfig = from_hf(read_json(folder / "config.json"), name)
        # Two engines may start and end at once, each in its own thread.
        self._lock = threading.Lock()
        self.level, self.asleep = 0, False
        self._weights: Weights | None = None
        self._tokenizer: Tokenizer | None = None
        self._users: tuple[User, ...] = ()

    @property
    def context(self) -> int:
        asked = self.settings.context
        return min(asked, self.config.context) if asked else self.config.context

    @property
    def weights(self) -> Weights:
        if self._weights is None:
            raise RuntimeError("the model isn't loaded")
        return self._weights

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise RuntimeError("the model isn't loaded")
        return self._tokenizer

    @cached_property
    def device(self) -> torch.device:
        """Raises UsageError for a GPU that isn't there; found once, it is asked for when it is lost too."""
        asked = self.settings.device
        if asked == AUTO:
            return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
        device = torch.device(asked)
        if device.type == "cuda":
            there = torch.cuda.device_count() if torch.cuda.is_available() else 0
            index = device.index or 0
            if index >= there:
                raise UsageError(f"device {asked}", f"torch sees {there} GPUs", "give device=cpu")
            return torch.device("cuda", index)
        return device

    @property
    def dtype(self) -> torch.dtype:
        name = self.settings.dtype
        if name == AUTO:
            name = "float32" if self.device.type == "cpu" else "bfloat16"
        found: torch.dtype = getattr(torch, name)
        return found

    @property
    def kv_dtype(self) -> torch.dtype:
        name = self.settings.kv_dtype
        found: torch.dtype = self.dtype if name == AUTO else getattr(torch, name)
        return found

    def open(self, user: User) -> None:
        """This engine runs on these weights from now on: load, if nobody has yet. Raises WeirError naming
        what is missing or broken."""
        with self._lock:
            self._users = (*self._users, user)
            if self._weights is not None:
                return
            self._tokenizer = load(self.folder, self.config.eos)
            name = str(self.dtype).removeprefix("torch.")
            self._weights = open_weights(self.folder, device=str(self.device), dtype=name)

    def leave(self, user: User) -> None:
        """It is done for good; the last one closes the weights. Fine when it never came."""
        with self._lock:
            self._users = tuple(other for other in self._users if other is not user)
            if not self._users and self._weights is not None:
                weights, self._weights, self._tokenizer = self._weights, None, None
                weights.close()

    async def quiet(self) -> None:
        """Nothing reads the weights, nor will before `wake`: `asleep` is set from here on.

        Raises RuntimeError while anybody runs something.
        """
        self._refuse_busy()
        self.asleep = True
        try:
            # What was cancelled may still be in the middle of its last step.
            await asyncio.gather(*(user.settle() for user in self._users))
            # A wake that somebody gave up may have come to its end, and let a request in.
            self._refuse_busy()
            self.asleep = True
        except BaseException:
            self.asleep = self.level > 0
            raise

    def _refuse_busy(self) -> None:
        if any(user.open for user in self._users):
            raise RuntimeError("can't sleep: sequences are running")

    def park(self, level: int) -> None:
        """Park (1) or drop (2) the weights; fine when they are already. Only after `quiet`."""
        if level > self.level:
            if level == 1:
                self.weights.park()
            else:
                self.weights.drop()
            self.level = level

    def park_again(self, level: int) -> None:
        """After a wake that failed: as it was before, or dropped where there is no memory for a copy."""
        try:
            self.park(level)
        except (RuntimeError, OSError, MemoryError) as error:
            log.warning("%s: the weights can't be parked again (%s): dropped", self.name, error)
            self.park(2)

    def unpark(self, more: int = 0) -> None:
        """Have the weights again; fine when they are here. more: bytes of the device wanted beside them.

        Raises WakeFailed, asleep as before, when there is no memory for both or they can't be read.
        """
        wanted = (self.weights.nbytes if self.level else 0) + more
        if wanted > (free := free_bytes(self.device)):
            raise WakeFailed(f"waking needs {wanted} bytes on {self.device}, {free} are free")
        try:
            if self.level == 1:
                self.weights.unpark()
            elif self.level:
                self.weights.reload()
        except WakeFailed:
            raise
        except (WeirError, OSError, RuntimeError, MemoryError) as error:
            raise WakeFailed(f"the weights don't come back: {error}") from error
        self.level = 0

    @property
    def weights_bytes(self) -> int:
        """On the device now. (`resident_bytes` would walk the page tables: not for every look at stats.)"""
        return self._weights.nbytes if self._weights is not None and not self.level else 0


def free_bytes(device: torch.device) -> int:
    """Memory that can be had: of the GPU, or of the machine."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return int(psutil.virtual_memory().available)
