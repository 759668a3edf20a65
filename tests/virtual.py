"""Virtual time for loops: `run(coroutine)` on a loop whose sleeps cost nothing.

looptime's own pytest plug-in needs pytest-asyncio, which the project doesn't use; the loop alone is enough.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import looptime

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run to the end in virtual time; `loop.time()` starts at 0 and jumps from timer to timer."""
    loop = looptime.patch_event_loop(asyncio.new_event_loop(), start=0.0)
    try:
        return loop.run_until_complete(main)
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
