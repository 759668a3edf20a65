"""What the worker thread drives: sequences in, one step at a time, outcomes out.

Law: types, and telling one kind of failure from another. Implementations: cached.py (paged KV cache) and
layerwise.py (recompute).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from services.faults import DeviceLost, EngineDied, EngineFault
from services.llama.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step did for one sequence: a token, or an error. finish: "", "stop" or "length".

    With an error or a finish the core has let go of the sequence.
    """

    sequence: Sequence
    token: int = -1
    finish: str = ""
    error: EngineFault | None = None


class Core(Protocol):
    """One thread calls all of these."""

    def add(self, sequence: Sequence) -> None:
        """It waits from now on."""

    def reap(self) -> None:
        """Let go of the cancelled ones, and of all they hold."""

    def busy(self) -> bool:
        """Whether `step` has anything to do."""

    def step(self) -> list[Outcome]:
        """Raises whatever breaks the engine for good."""

    def everyone(self) -> Iterable[Sequence]:
        """Running and waiting."""


_WORDS = ("can't allocate memory", "not enough memory", "out of memory")


def is_out_of_memory(error: BaseException) -> bool:
    """torch's allocator for CPUs raises a plain RuntimeError with words in it."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _WORDS)


def is_device_lost(error: BaseException) -> bool:
    """CUDA says so too when pinned memory runs out: that is another matter."""
    return isinstance(error, torch.AcceleratorError) and not is_out_of_memory(error)


def death(error: BaseException) -> EngineDied:
    """What everybody hears after a step that failed in no way we know: the device's own fault, or ours."""
    text = f"a step failed: {type(error).__name__}: {error}"
    return DeviceLost(text) if is_device_lost(error) else EngineDied(text)
