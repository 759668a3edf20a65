"""Shares of a device's memory: who starts second and can't fit is told so before anything is loaded.

Law: a claim lives as long as its process and needs no cleaning up. `why_not` is pure; the book (one file a
device) is kept in a folder that only this user can enter, that is its own lock, and that goes with the last
claim. Memory that is in use but not claimed
counts too, since the device says so.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mesh.world import files
from regions.cli.errors import Refused, WeirError
from services.devices.door import Device

RESERVE = 0.02
"""Share of a device that nobody may claim."""
GIB = 2**30
_START = 18
"""Place of a process's start in /proc/PID/stat, counted from what follows the state (man 5 proc)."""


@dataclass(frozen=True, slots=True)
class Claim:
    """born: which process that pid was: the pid alone may be somebody else by now (see `_born`)."""

    pid: int
    born: str
    name: str
    size: int


def why_not(device: Device, need: int, claims: Iterable[Claim]) -> str:
    """Why `need` bytes can't be claimed on top of these, or empty."""
    usable = int(device.memory_total * (1 - RESERVE))
    others = tuple(claims)
    taken = sum(claim.size for claim in others)
    # What another one has claimed and not yet taken looks free, and is not.
    if need > usable - taken:
        who = ", ".join(f"{c.name} (process {c.pid}) has {_gib(c.size)}" for c in others) or "nobody has any"
        return f"{_gib(need)} don't fit: {_gib(usable)} may be claimed, {who}"
    if need > device.memory_free:
        return (
            f"{_gib(need)} don't fit: of {_gib(device.memory_total)} only {_gib(device.memory_free)} are free"
        )
    return ""


def claims_folder() -> Path:
    """One for all of this user's instances on this host, whatever world they are of."""
    return Path(tempfile.gettempdir()) / f"weir-{os.getuid()}-devices"


@contextmanager
def claimed(folder: Path, device: Device, need: int, name: str) -> Iterator[None]:
    """Hold a share of the device for the length of the block. Raises Refused when it doesn't fit."""
    own = Claim(os.getpid(), _born(os.getpid()), name, need)
    book = folder / f"{_file(device.uuid)}.json"
    with _locked(folder):
        others = _living(book)
        if why := why_not(device, need, others):
            raise Refused(
                f"device {device.uuid}", why, "claim less (--device-memory), or take another device"
            )
        files.write_json(book, [asdict(claim) for claim in (*others, own)])
    try:
        yield
    finally:
        with _locked(folder):
            if left := [asdict(claim) for claim in _living(book) if claim != own]:
                files.write_json(book, left)
            else:
                book.unlink(missing_ok=True)


def _living(book: Path) -> tuple[Claim, ...]:
    rows: Any = files.read_json(book)
    try:
        found = [Claim(int(r["pid"]), str(r["born"]), str(r["name"]), int(r["size"])) for r in rows or ()]
    except (KeyError, TypeError, ValueError):
        # Whoever wrote this is not us; claims of living instances come back when they start again.
        return ()
    return tuple(claim for claim in found if claim.born and claim.born == _born(claim.pid))


def _born(pid: int) -> str:
    """The boot and the clock ticks from it to the start of a process; empty when it is dead, zombies too.

    No time of day (psutil's create_time): that moves for all processes when somebody sets the clock.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return ""
    # The name of a program may hold anything, brackets too; after its last one come state and the rest.
    state, *rest = stat.rpartition(b")")[2].split()
    return "" if state in (b"Z", b"X") else f"{boot}:{int(rest[_START])}"


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Alone with the books. The folder itself is locked: a lock file in it would have to be left behind."""
    handle = _hold(folder)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            folder.rmdir()  # refused while it has a book in it
        os.close(handle)


def _hold(folder: Path) -> int:
    """A lock on the folder that stands there now: whoever had it before us may have removed the one that we
    waited for, and a third may have made a new one since. Raises WeirError."""
    while True:
        try:
            handle = os.open(files.private_folder(folder), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError:
            continue  # removed between being made and being opened
        except WeirError as error:
            # Or half-way through that: there when it was to be made, gone when it was looked at.
            stands = os.path.lexists(folder) and not folder.is_dir()
            if isinstance(error.__cause__, FileNotFoundError | FileExistsError) and not stands:
                continue
            raise
        fcntl.flock(handle, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), folder.lstat()):
                return handle
        os.close(handle)


def _file(uuid: str) -> str:
    """A file name that is safe and still says which device."""
    plain = re.sub(r"[^A-Za-z0-9-]", "_", uuid)[:40]
    return f"{plain}-{hashlib.sha256(uuid.encode()).hexdigest()[:8]}"


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
