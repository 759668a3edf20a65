"""Parked files: the weights of a model in one run dtype, as one file in the user's cache that processes map.

Law: a file appears whole or not at all, is checked whenever it is mapped anew, and is written again when it
isn't sound. The folder stays under its limit: what was used longest ago goes, what is in use stays. Written
without fsync: what a power cut leaves fails its check.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from services.weights import pages
from services.weights.arena import FileArena
from services.weights.folder import Folder
from services.weights.layout import VERSION
from services.weights.plan import PIECE
from services.weights.sums import NAME as SUMS
from services.weights.sums import digest

log = logging.getLogger("weir.weights")

LIMIT = 16 << 30
"""Bytes. A file larger than that is kept all the same, alone."""
LIMIT_ENV = "WEIR_PARKED_LIMIT_GIB"
_SUFFIX, _SUM_SUFFIX, _SCRATCH = ".weights", ".sum", ".writing"
_THREADS = 8


def key(folder: Folder, dtype: str) -> str:
    """Names what a parked file holds: these very files (by size, time and headers' facts) in this dtype."""
    found = hashlib.blake2b(f"{VERSION} {dtype}".encode(), digest_size=16)
    for name in sorted(folder.shards):
        shard = folder.shards[name]
        found.update(f"\0{name} {shard.path.stat().st_mtime_ns} {shard.nbytes} {shard.facts}".encode())
    sums = folder.path / SUMS
    if sums.is_file():
        found.update(sums.read_bytes())
    return found.hexdigest()


class Unsound(Exception):
    """This parked file can't be used: why."""


class Parked:
    """One parked file, mapped and in use. `check` reads all of it."""

    def __init__(self, path: Path, nbytes: int) -> None:
        """Raises Unsound."""
        try:
            lease = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise Unsound(f"{error}") from error
        # Held as long as we are, closed or forgotten: who makes room leaves the file alone meanwhile.
        self._lease = weakref.finalize(self, os.close, lease)
        try:
            fcntl.flock(lease, fcntl.LOCK_SH)
            body = json.loads(path.with_suffix(_SUM_SUFFIX).read_bytes())
            self._sums: list[str] = list(map(str, body["chunks"]))
            if path.stat().st_size != nbytes or body["bytes"] != nbytes:
                raise ValueError("another size than the weights have")
            self.arena = FileArena(path, nbytes)
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._lease()
            raise Unsound(f"{error}") from error

    def check(self, note: Callable[[int], None]) -> None:
        """Bring all pages in and compare. note: called with each chunk's bytes. Raises Unsound."""
        for number, (size, found) in enumerate(chunks(self.arena)):
            if number >= len(self._sums) or self._sums[number] != found:
                raise Unsound(f"bytes from {number * PIECE} on changed on disk")
            note(size)

    def close(self) -> None:
        self.arena.close()
        self._lease()


def chunks(arena: FileArena) -> Iterator[tuple[int, str]]:
    """Size and sum of each chunk, in order, by several threads. Raises Unsound when a page can't be had."""
    view = arena.view

    def one(start: int) -> tuple[int, str]:
        size = min(PIECE, arena.nbytes - start)
        pages.populate(arena.address + start, size)
        return size, digest(view[start : start + size])

    with ThreadPoolExecutor(_THREADS, "weir-check") as pool:
        try:
            yield from pool.map(one, range(0, arena.nbytes, PIECE))
        except OSError as error:
            raise Unsound(f"{error}") from error


def limit(environ: Mapping[str, str]) -> int:
    """Bytes that parked files may take; WEIR_PARKED_LIMIT_GIB overrides it. Raises ValueError."""
    return int(float(environ[LIMIT_ENV]) * (1 << 30)) if environ.get(LIMIT_ENV) else LIMIT


class Cache:
    """The folder of parked files. Raises OSError when it can't be written or the disk is full."""

    def __init__(self, folder: Path, limit: int = LIMIT) -> None:
        self._folder, self._limit = folder, limit

    def find(self, name: str, nbytes: int) -> Parked | None:
        """The file of this name, when there is one of this size; not checked yet."""
        path = self._path(name)
        if not path.is_file():
            return None
        try:
            found = Parked(path, nbytes)
        except Unsound as why:
            log.warning("parked weights %s: %s; writing them again", path.name, why)
            return None
        os.utime(path)
        return found

    def write(self, name: str, nbytes: int, fill: Callable[[FileArena], None]) -> Parked:
        """Make it: `fill` writes the weights. Raises what `fill` raises, and leaves nothing behind then."""
        scratch = self._folder / f"{name}{_SCRATCH}"
        try:
            _allocate(scratch, nbytes)
            arena = FileArena(scratch, nbytes, shared=True)
            try:
                fill(arena)
                body = {"bytes": nbytes, "chunks": [found for _, found in chunks(arena)]}
            finally:
                arena.close()
            path = self._path(name)
            path.unlink(missing_ok=True)
            path.with_suffix(_SUM_SUFFIX).write_text(json.dumps(body), "utf-8")
            scratch.rename(path)
        finally:
            scratch.unlink(missing_ok=True)
        parked = Parked(path, nbytes)
        self._prune()
        return parked

    @contextmanager
    def writing(self) -> Iterator[None]:
        """One writer at a time; others wait and find the file. The kernel frees the lock when we die."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / "lock").open("a") as handle:
            if not _locked(handle):
                log.info("another process parks weights in %s; waiting", self._folder)
                fcntl.flock(handle, fcntl.LOCK_EX)
            for left in self._folder.glob(f"*{_SCRATCH}"):
                left.unlink(missing_ok=True)
            yield

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}{_SUFFIX}"

    def _prune(self) -> None:
        """Remove what was used longest ago, until the rest fits. Called by the one writer."""
        files = sorted(self._folder.glob(f"*{_SUFFIX}"), key=lambda p: p.stat().st_mtime)
        over = sum(path.stat().st_size for path in files) - self._limit
        for path in files:
            if over <= 0:
                return
            with path.open("rb") as handle:
                if not _locked(handle):
                    continue
                over -= path.stat().st_size
                path.unlink()
                path.with_suffix(_SUM_SUFFIX).unlink(missing_ok=True)
                log.info("parked weights %s removed: the limit is %d MiB", path.name, self._limit >> 20)


def _allocate(path: Path, nbytes: int) -> None:
    """A file of zeros, its pages in the page cache in the large folios that only large writes make. What the
    disk has no room for is an OSError here, and not a SIGBUS while tensors are written.
    """
    zeros = memoryview(bytes(PIECE))
    with path.open("wb", buffering=0) as file:
        for start in range(0, nbytes, PIECE):
            wanted = min(PIECE, nbytes - start)
            if os.pwrite(file.fileno(), zeros[:wanted], start) != wanted:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def _locked(handle: IO[str] | IO[bytes]) -> bool:
    """Take this lock if nobody has it."""
    with suppress(BlockingIOError):
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False
