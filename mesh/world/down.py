"""Taking a world, or one region of it, down, and proving that nothing is left.

Law: ends only processes that carry this world's marks. Works without supervisors, and without a
description that can be read.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from mesh.world import create, facts, lock, patience, strays
from mesh.world.layout import WorldLayout
from mesh.world.world import NoWorld, World, load_description
from regions.cli.errors import Refused, WeirError

SUPERVISOR_GRACE_S = 40.0
"""An executor may drain for 15 s, then Envoys, control plane and Consul follow."""
KILL_WAIT_S = 5.0


@dataclass(frozen=True, slots=True)
class Ended:
    """regions: those whose supervisor was stopped. strays: processes that had to be ended one by one."""

    regions: tuple[str, ...] = ()
    strays: tuple[strays.Stray, ...] = ()


def take_down(folder: Path, *, purge: bool = False) -> Ended:
    """Stop everything of the world at `folder`. Raises NoWorld when there is none and nothing of it runs."""
    if not folder.exists() and not strays.find(folder):
        raise NoWorld(str(folder), "there is no world here", "name its folder with --dir")
    layout, names = _known(folder)
    with locked(folder, wait_s=SUPERVISOR_GRACE_S):
        stopped = _stop(layout, names) if layout is not None else ()
        left = strays.find(folder)
        strays.end(left)
        if layout is not None:
            for name in names:
                clear_region(layout, name)
            _remove_runtime(layout)
        _prove(folder)
        create.clear_parts(folder)
    if purge:
        create.forget(folder)
    return Ended(stopped, left)


def region_down(folder: Path, region: str) -> Ended:
    """Stop one region; its Consul data stays. Fine when it is down. Raises NoWorld for an unknown one."""
    world = World.load(folder)
    world.address(region)
    with locked(folder, wait_s=SUPERVISOR_GRACE_S):
        stopped = _stop(world.layout, (region,))
        left = strays.find(world.folder, region)
        strays.end(left)
        clear_region(world.layout, region)
        if not world.running:
            _remove_runtime(world.layout)
        _prove(world.folder, region)
    return Ended(stopped, left)


@contextmanager
def locked(folder: Path, wait_s: float) -> Iterator[None]:
    """The world's lock for the length of the block; waits up to wait_s, then Refused names the holder."""
    path = folder / "world.lock"
    deadline = patience.now() + wait_s
    while True:
        with lock.held(path) as got:
            if got:
                yield
                return
        if patience.now() > deadline:
            holder = lock.holder(path)
            raise Refused(str(folder), f"process {holder} is bringing this world up or down", "wait for it")
        patience.pause(patience.EVERY_S)


def clear_region(layout: WorldLayout, region: str) -> None:
    """Remove what only means something while the region runs: sockets and region.json."""
    paths = layout.region(region)
    paths.ads_socket.unlink(missing_ok=True)
    paths.control_socket.unlink(missing_ok=True)
    facts.remove(paths)


def _known(folder: Path) -> tuple[WorldLayout | None, tuple[str, ...]]:
    with contextlib.suppress(NoWorld):
        found = load_description(folder)
        if found is not None:
            layout, spec = found
            return layout, spec.names
    return None, ()


def _stop(layout: WorldLayout, names: Sequence[str]) -> tuple[str, ...]:
    """SIGTERM to the supervisors that live, SIGKILL to those that outlast it. Returns their regions."""
    pids = {name: pid for name in names if (pid := lock.holder(layout.region(name).lock))}
    for pid in pids.values():
        _send(pid, signal.SIGCONT)
        _send(pid, signal.SIGTERM)
    paths = {name: layout.region(name).lock for name in pids}

    def gone() -> bool:
        # The lock goes a moment before the process does; nothing is left when both are gone.
        return not any(lock.holder(paths[name]) == pid or _alive(pid) for name, pid in pids.items())

    if not patience.until(gone, SUPERVISOR_GRACE_S):
        for name, pid in pids.items():
            if lock.holder(paths[name]) == pid:
                _send(pid, signal.SIGKILL)
        patience.until(gone, KILL_WAIT_S)
    return tuple(pids)


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _send(pid: int, sign: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, sign)


def _remove_runtime(layout: WorldLayout) -> None:
    with contextlib.suppress(FileNotFoundError):
        for path in layout.runtime.iterdir():
            path.unlink(missing_ok=True)
        layout.runtime.rmdir()


def _prove(folder: Path, region: str | None = None) -> None:
    left = strays.find(folder, region)
    if left:
        named = ", ".join(f"{s.region}/{s.process} (process {s.pid})" for s in left)
        raise WeirError(str(folder), f"still running: {named}", "end them by hand (kill -9) and look why")
