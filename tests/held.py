"""What this process holds, to tell a leak from what others open and close in the same process.

Law: looks only. What is counted over the whole process (memory, threads) is judged by `least_growth` alone: a
leak shows in every stretch of work, what another test's thread or the allocator does shows once.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import psutil

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


def least_growth(measured: Sequence[int]) -> int:
    """What every stretch between two measures added at least; negative where one gave back."""
    return min(after - before for before, after in pairwise(measured))


def written_memory() -> int:
    """Bytes in memory that the process has written itself. Pages of files (libraries, page cache) aren't
    among them: they come and go as the kernel likes."""
    now = psutil.Process().memory_info()
    return int(now.rss - now.shared)


def _links() -> list[str]:
    links = []
    for name in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:  # the one that listed them, or another thread's
            continue
    return links
