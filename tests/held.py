"""What this process holds of a test's own folder, to tell a leak from what others open and close.

Law: looks only. Never counts all descriptors of the process: a socket of some library's background thread
isn't the test's.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

NAMELESS = "/memfd:"


class Held(NamedTuple):
    """Counts, of files in a folder (removed ones too) and of files without a name (memfd)."""

    descriptors: int
    mappings: int


def held_of(folder: Path) -> Held:
    ours = (f"{folder}/", NAMELESS)
    maps = Path("/proc/self/maps").read_text().splitlines()
    # proc(5): address, permissions, offset, device, inode, and the file's name if there is one.
    named = [line.split(maxsplit=5)[-1] for line in maps if line.count("/")]
    return Held(sum(link.startswith(ours) for link in _links()), sum(name.startswith(ours) for name in named))


def _links() -> list[str]:
    links = []
    for name in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:  # the one that listed them, or another thread's
            continue
    return links
