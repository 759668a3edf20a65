"""Waiting for something outside this process, without a loop that burns the machine.

Law: blocks the calling thread; for commands, not for event loops.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from mesh.clock import SystemClock

EVERY_S = 0.05


def pause(seconds: float) -> None:
    """Let this many seconds pass."""
    threading.Event().wait(seconds)


def now() -> float:
    """Monotonic seconds."""
    return SystemClock().monotonic()


def until(condition: Callable[[], bool], timeout_s: float, every_s: float = EVERY_S) -> bool:
    """Ask again and again until `condition` holds; False when it still doesn't after timeout_s."""
    deadline = now() + timeout_s
    while not condition():
        if now() > deadline:
            return False
        pause(every_s)
    return True
