"""What the kernel knows about the pages of an address range, and what we tell it to do with them.

Law: system calls on addresses that the caller owns; no torch, no files, no policy. Python's own
`mmap.madvise` holds the interpreter lock for the length of the call, which for 512 MB is the time of several
decode steps; through ctypes the lock is free meanwhile.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise

PAGE = mmap.PAGESIZE
MADV_DONTNEED = 4
MADV_POPULATE_READ = 22
"""Since Linux 5.14; Python 3.11 has no name for it."""

_ENTRY = 8
_CHUNK = 1 << 20
_FILL_UNIT = 32 << 20
_FILL_THREADS = 4

_LOWEST_BIT = bytes(byte & 1 for byte in range(256))
_HIGHEST_BIT = bytes(byte >> 7 for byte in range(256))

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)


def up(nbytes: int, step: int = PAGE) -> int:
    """The next multiple of `step`."""
    return -(-nbytes // step) * step


def anonymous(nbytes: int, *, dense: bool) -> mmap.mmap:
    """Memory of our own, zeros, in whole pages; `dense`: in large ones where the system has them."""
    memory = mmap.mmap(-1, up(max(1, nbytes)), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if dense:
        large(memory)
    return memory


def large(memory: mmap.mmap) -> None:
    """Ask for large pages. Of a file too: what the page cache has in large folios is mapped 2 MiB at a time,
    512 MB in half a millisecond instead of 25, and what comes from the disk is read ahead in such steps.
    """
    # Not built into every kernel, and no loss then.
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)


def advise(address: int, nbytes: int, advice: int) -> None:
    """madvise(2). Raises OSError."""
    if _libc.madvise(address, nbytes, advice) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"madvise({advice}) of {nbytes} bytes: {os.strerror(code)}")


def give_back(address: int, nbytes: int) -> None:
    """Take these pages out of this process. What was written to them is lost; a private or shared mapping of
    a file shows the file again when read, an anonymous one zeros.
    """
    advise(address, up(nbytes), MADV_DONTNEED)


def fill(address: int, nbytes: int) -> None:
    """Bring the pages in, several threads at a time; what the disk must give is read here. Raises OSError,
    also where a file ends before its mapping does (a plain read of such a page would kill the process).
    """
    cuts = [*range(0, nbytes, _FILL_UNIT), nbytes]
    with ThreadPoolExecutor(_FILL_THREADS, "weir-fill") as pool:
        list(pool.map(lambda cut: populate(address + cut[0], cut[1] - cut[0]), pairwise(cuts)))


def populate(address: int, nbytes: int) -> None:
    """The same in this thread."""
    try:
        advise(address, up(nbytes), MADV_POPULATE_READ)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # An older kernel: touch each page.
        for offset in range(0, nbytes, PAGE):
            ctypes.string_at(address + offset, 1)


def cached(address: int, nbytes: int) -> float:
    """Share of these pages of a file mapping that the page cache has, whoever brought them. OSError if
    nobody can tell."""
    count = up(nbytes) // PAGE
    vector = ctypes.create_string_buffer(count)
    if _libc.mincore(address, up(nbytes), vector) != 0:
        raise OSError(ctypes.get_errno(), f"mincore of {nbytes} bytes")
    return vector.raw.translate(_LOWEST_BIT).count(1) / count


def resident(address: int, nbytes: int) -> int:
    """Bytes of this range that this process holds in memory. mincore(2) would answer for the page cache,
    which is everybody's, hence /proc/self/pagemap. Raises OSError where there is no such file.
    """
    found = 0
    first, count = address // PAGE, up(nbytes) // PAGE
    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        pagemap.seek(first * _ENTRY)
        while count > 0:
            entries = pagemap.read(min(_CHUNK, count * _ENTRY))
            if not entries:
                break
            # Bit 63 is "present", in the last byte of eight; counted in C, since there may be millions.
            found += entries[_ENTRY - 1 :: _ENTRY].translate(_HIGHEST_BIT).count(1)
            count -= len(entries) // _ENTRY
    return found * PAGE
