"""Runs one command and lets nothing of it outlive us: the process between an executor and its vLLM.

Law: standard library only, started by path (`python -I leash.py COMMAND…`), so that it costs some megabytes
and no import of ours. Its stdin is a pipe that the executor holds open and never writes to: when that ends,
however the executor ended, everything that the command started is killed. vLLM's own children survive the
death of their parent; a parent-death signal on the first one alone would leave gigabytes behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from types import FrameType

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
ROUND_S = 0.02
"""Between two looks at what is left."""
SIGNALLED = 128
"""Added to the number of the signal that ended the command, as shells do."""


def become_subreaper() -> None:
    """Orphans of the command become our children, so that they can be found by it and not be missed."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(root: int) -> list[int]:
    """Pids below `root`, zombies too. One pass over /proc: a list of children per process is not in every
    kernel."""
    below: dict[int, list[int]] = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            # The name of a program may hold anything, brackets too; after its last one comes the state.
            parent = int(file.read().rpartition(b")")[2].split()[1])
            below.setdefault(parent, []).append(int(name))
    found, next_ones = [], [root]
    while next_ones:
        next_ones = [child for one in next_ones for child in below.get(one, ())]
        found += next_ones
    return found


def kill_all() -> None:
    """SIGKILL to everything below us, until nothing is left: what forks meanwhile is caught in the next
    round."""
    while below := descendants(os.getpid()):
        for pid in below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(ROUND_S)


def main(argv: list[str]) -> int:
    """Exit status of the command, 128 + signal if one ended it."""
    become_subreaper()
    # Where the executor is killed while all of us are stopped, the kernel wakes this group with SIGHUP and
    # SIGCONT. Handled, not ignored: the command would inherit that.
    signal.signal(signal.SIGHUP, lambda *_: None)
    held = os.dup(0)
    # It stays in our process group, so that the executor can find what is left if somebody kills us.
    child = subprocess.Popen(argv, stdin=subprocess.DEVNULL)

    def pass_on(number: int, _: FrameType | None) -> None:
        child.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, pass_on)
    over = os.pidfd_open(child.pid)
    select.select([held, over], [], [])
    done = child.poll()
    kill_all()
    if done is None:
        return SIGNALLED + signal.SIGKILL
    return done if done >= 0 else SIGNALLED - done


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
