"""A world that belongs to one bench: `with own_world(Wish(regions=("us-east-1",))) as world: ...`

Law: made in a temporary folder, taken down and removed whatever happens in the block.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from mesh.world.down import take_down
from mesh.world.up import bring_up
from mesh.world.wish import Wish
from mesh.world.world import NoWorld, World
from regions.cli.output import talk


@contextlib.contextmanager
def own_world(wish: Wish, *, timeout_s: float = 120.0) -> Iterator[World]:
    """A world that is up and ready. Raises what `bring_up` raises."""
    folder = Path(tempfile.mkdtemp(prefix="weir-bench-"))
    try:
        yield bring_up(folder / ".weir", wish, None, talk(), timeout_s=timeout_s)
    finally:
        with contextlib.suppress(NoWorld):
            take_down(folder / ".weir", purge=True)
        shutil.rmtree(folder, ignore_errors=True)
