"""Files that are whole or not there: every write goes to a temporary name and is renamed.

Law: the only file writer of the room. It knows no file of the world by name; a full disk, a read-only
or a foreign folder become errors that a person can act on.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from regions.cli.errors import WeirError

MIN_FREE_BYTES = 200 * 1024 * 1024


def write(path: Path, data: str | bytes, *, mode: int = 0o644) -> None:
    """Write atomically. `mode` holds from the first byte on, so that a secret is never readable by others."""
    raw = data.encode() if isinstance(data, str) else data
    with explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
        try:
            with os.fdopen(handle, "wb") as out:
                os.fchmod(out.fileno(), mode)
                out.write(raw)
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


def write_json(path: Path, body: Any, *, mode: int = 0o644) -> None:
    write(path, json.dumps(body, indent=2) + "\n", mode=mode)


def read_json(path: Path) -> Any:
    """The parsed file, or None when it isn't there or is not JSON (a file cut off by a crash of old)."""
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None


def private_folder(path: Path) -> Path:
    """Make a folder that only we can enter. Raises WeirError when it is a link or belongs to someone else."""
    with explained(path):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.lstat()
    if path.is_symlink() or found.st_uid != os.getuid():
        raise WeirError(str(path), "is a link or belongs to another user", "remove it and try again")
    path.chmod(0o700)
    return path


def check_space(path: Path) -> None:
    """Raise WeirError when less than MIN_FREE_BYTES is free under `path` (or its nearest parent)."""
    place = path
    while not place.exists() and place != place.parent:
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < MIN_FREE_BYTES:
        raise WeirError(
            str(path),
            f"only {free // 2**20} MB free on this disk, a world needs {MIN_FREE_BYTES // 2**20} MB",
            "free some space, or put the world elsewhere with --dir",
        )


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn OSErrors about `path` into a WeirError that names the way out."""
    try:
        yield
    except OSError as error:
        raise _explain(path, error) from error


def _explain(path: Path, error: OSError) -> WeirError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return WeirError(str(path), "no space left on the disk", "free some space, or use --dir elsewhere")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return WeirError(
            str(path), f"can't be written ({error.strerror})", "use --dir with a folder of yours"
        )
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        return WeirError(str(path), "a file stands where a folder must be", "move it away, or use --dir")
    return WeirError(str(path), error.strerror or str(error), "")
