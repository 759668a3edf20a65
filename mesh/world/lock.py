"""Locks that die with their holder: a POSIX record lock on a file that carries the holder's pid.

Law: the lock is the truth, the pid in the file only tells others (Terraform reads it). So a crash leaves
nothing to clean up, and a pid used again by a stranger fools nobody. Record locks are not handed to
children, and may be asked about without being taken.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mesh.world import files

# struct flock of Linux on 64-bit machines: type, whence, start, length, pid.
_FLOCK = "hhqqi4x"


@contextmanager
def held(path: Path) -> Iterator[bool]:
    """Try to take the lock for the length of the block; yields whether it was got.

    One holder per process: the lock goes when any descriptor of the file is closed in this process.
    """
    with files.explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            yield False
            return
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        yield True
    finally:
        os.close(handle)


def holder(path: Path) -> int | None:
    """Pid of the process (not this one) that holds the lock, or None when nobody does."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        wish = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = struct.unpack(_FLOCK, fcntl.fcntl(handle, fcntl.F_GETLK, wish))
        return None if kind == fcntl.F_UNLCK else int(pid)
    finally:
        os.close(handle)
