"""Memory in one piece that can be given back and taken again while the tensors on it live on.

Law: an arena owns its address range from making to closing; tensors are views of it and stay valid objects
while it is parked, only their contents are not to be read then. Knows bytes and tensors, no models. CPU only.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from services.weights import pages


class _Arena:
    """A mapping and its address."""

    def __init__(self, memory: mmap.mmap, nbytes: int) -> None:
        self.nbytes = nbytes
        self._memory: mmap.mmap | None = memory
        self._whole = torch.frombuffer(memory, dtype=torch.uint8)
        self._address = self._whole.data_ptr()

    @property
    def address(self) -> int:
        return self._address

    @property
    def view(self) -> memoryview:
        """Its bytes. Whoever holds a view keeps the address range."""
        if self._memory is None:
            raise ValueError("the arena is closed")
        return memoryview(self._memory)[: self.nbytes]

    def tensor(self, dtype: torch.dtype, shape: Sequence[int], offset: int) -> torch.Tensor:
        """A view of this shape at `offset` bytes (a multiple of the dtype's size). Raises ValueError when it
        doesn't lie inside the arena.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        if offset < 0 or offset + nbytes > self.nbytes:
            raise ValueError(f"{nbytes} bytes at {offset} don't lie inside an arena of {self.nbytes}")
        return self._whole[offset : offset + nbytes].view(dtype).view(tuple(shape))

    def release(self) -> None:
        """Give all pages back to the system: anonymous memory reads as zeros afterwards."""
        if self._memory is not None:
            pages.give_back(self._address, self.nbytes)

    def resident_bytes(self) -> int:
        """Bytes of it in this process's memory now."""
        return 0 if self._memory is None else pages.resident(self._address, self.nbytes)

    def close(self) -> None:
        """Pages go at once; the address range goes with the last tensor on it. Fine to call twice."""
        self.release()
        self._memory = None
        self._whole = torch.empty(0, dtype=torch.uint8)


class HostArena(_Arena):
    """Anonymous memory, zeros at first and after every `release`; costs nothing until written.

    dense: all of it will be written, so that large pages are no waste.
    """

    def __init__(self, nbytes: int, *, dense: bool = False) -> None:
        super().__init__(pages.anonymous(nbytes, dense=dense), nbytes)


class FileArena(_Arena):
    """A file's bytes, copy on write: who writes to a tensor changes neither the file nor other processes.
    With `shared`, writing to a tensor writes the file.

    Processes that map the same file share its pages; parked, the pages leave this process and stay in the
    page cache, from where they come back in tens of milliseconds, or go when somebody needs the memory.
    """

    def __init__(self, path: Path, nbytes: int, *, shared: bool = False) -> None:
        """Raises OSError, or ValueError when the file is shorter than `nbytes`."""
        self.path = path
        flags = mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE
        with path.open("r+b" if shared else "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < nbytes:
                raise ValueError(f"{path} has {size} bytes, wanted {nbytes}")
            prot = mmap.PROT_READ | mmap.PROT_WRITE
            memory = mmap.mmap(file.fileno(), nbytes, flags=flags, prot=prot)
        pages.large(memory)
        super().__init__(memory, nbytes)

    def park(self) -> None:
        """Drop the pages from this process; the page cache keeps them."""
        self.release()

    def unpark(self) -> None:
        """Bring them back. Raises OSError when the file can't be read any more."""
        pages.fill(self._address, self.nbytes)

    def forget(self) -> None:
        """Drop them from the page cache too, where no other process has them mapped."""
        self.release()
        # Somebody may have tidied the cache: what has no name any more goes when we do.
        with suppress(FileNotFoundError), self.path.open("rb") as file:
            # Only clean pages can go.
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
