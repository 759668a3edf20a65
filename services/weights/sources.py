"""Three ways to get a byte range of a file: past the page cache, through it, or as a mapping of it.

Law: each way knows one file and gives exactly the range asked for, or raises OSError; which way is best is
not decided here. Called from several threads at once, each with a buffer of its own.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from services.weights import pages
from services.weights.plan import SECTOR, aligned


class Way(StrEnum):
    DIRECT = "direct"
    MAPPED = "mapped"
    BUFFERED = "buffered"


class Source(Protocol):
    """An open file."""

    def take(self, start: int, stop: int, buffer: memoryview) -> memoryview:
        """Bytes start..stop, in `buffer` (page-aligned, two sectors longer than the range) or not."""

    def close(self) -> None:
        """Views from `take` are dead afterwards."""


def short(path: str, wanted: int, got: int) -> OSError:
    """A file that became shorter while we read it."""
    return OSError(errno.EIO, f"the file ends at byte {got}, wanted up to {wanted}", path)


class Reads:
    """preadv(2); with `direct` by O_DIRECT, in whole sectors. Raises OSError where the file system can't."""

    def __init__(self, path: Path, *, direct: bool) -> None:
        self._path, self._direct = str(path), direct
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0))

    def take(self, start: int, stop: int, buffer: memoryview) -> memoryview:
        first, last = aligned(start, stop) if self._direct else (start, stop)
        at = first
        while at < stop:
            got = os.preadv(self._fd, [buffer[at - first : last - first]], at)
            if got == 0 or (self._direct and got % SECTOR and at + got < stop):
                raise short(self._path, stop, at + got)
            at += got
        return buffer[start - first : stop - first]

    def close(self) -> None:
        os.close(self._fd)


class Mapped:
    """A private mapping: no copy at all where the page cache has the bytes. Filled before it is read, so that
    a file that was cut off meanwhile is an OSError and not a SIGBUS.
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            prot = mmap.PROT_READ | mmap.PROT_WRITE
            self._map = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=prot)
        pages.large(self._map)
        anchor = ctypes.c_char.from_buffer(self._map)
        self._address = ctypes.addressof(anchor)
        del anchor
        self._view = memoryview(self._map)
        self._path = str(path)

    def take(self, start: int, stop: int, buffer: memoryview) -> memoryview:
        if stop > len(self._view):
            raise short(self._path, stop, len(self._view))
        first, last = aligned(start, stop, pages.PAGE)
        pages.populate(self._address + first, last - first)
        return self._view[start:stop]

    def cached(self) -> float:
        """Share of the file in the page cache, 0..1."""
        return pages.cached(self._address, len(self._view))

    def close(self) -> None:
        # The mapping goes with the last view of it: now, unless a traceback still holds one.
        del self._view, self._map


def open_source(path: Path, way: Way) -> Source:
    """Raises OSError."""
    return Mapped(path) if way is Way.MAPPED else Reads(path, direct=way is Way.DIRECT)


def cached(paths: Iterable[Path]) -> float:
    """Share of these files in the page cache, 0..1, by pages; 0 where nobody can tell."""
    shares = []
    for path in paths:
        try:
            source = Mapped(path)
        except (OSError, ValueError):
            return 0.0
        try:
            shares.append((source.cached(), path.stat().st_size))
        except OSError:
            return 0.0
        finally:
            source.close()
    return sum(share * size for share, size in shares) / max(1, sum(size for _, size in shares))


def ways(path: Path) -> tuple[Way, ...]:
    """Those that work on this file, by trying."""
    found = []
    buffer = memoryview(mmap.mmap(-1, 3 * SECTOR))
    for way in Way:
        try:
            source = open_source(path, way)
        except (OSError, ValueError):
            continue
        try:
            source.take(0, 1, buffer)
            found.append(way)
        except OSError:
            continue
        finally:
            source.close()
    return tuple(found)
