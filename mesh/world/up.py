"""Bringing a world, or one region of it, up: start what is missing, wait until it is ready.

Law: starts supervisors and nothing else; changes nothing that runs. May be called again at any time.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from mesh.world import create, down, patience, ports, strays, warm
from mesh.world.control import RegionStatus, SupervisorGone
from mesh.world.engines import ECHO, ENGINES, check_words, needs
from mesh.world.layout import MARKER
from mesh.world.process import State
from mesh.world.progress import Progress
from mesh.world.runner import find_programs, weir_command
from mesh.world.wish import Wish
from mesh.world.world import NoWorld, World, load_description
from regions.cli.errors import Exit, Refused, UsageError, WeirError

LOOK_EVERY_S = 0.1
LOCK_WAIT_S = 60.0
TOO_MANY_RESTARTS = 5
LOG_LINES = 5


@dataclass(slots=True)
class Started:
    """What this call has started: region → supervisor."""

    supervisors: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)


def bring_up(
    folder: Path,
    want: Wish,
    only: str | None,
    console: Console,
    *,
    regions_dir: Path | None = None,
    timeout_s: float | None = None,
) -> World:
    """Bring up all regions of the world (or `only` one) and wait until they are ready.

    On Ctrl-C what this call started is stopped again, then KeyboardInterrupt goes on.
    Raises WeirError (PARTIAL when some regions became ready and some did not).
    """
    started = Started()
    _prepare(folder, want)
    try:
        world, names = _start(folder, want, only, regions_dir, started)
        _wait(world, names, started, console, timeout_s or ENGINES[world.spec.engine].ready_s)
        if started.supervisors:
            for region, hosts in warm.wait(world, world.running).items():
                console.print(f"{region}: its ingress still passes over {'; '.join(hosts)}", markup=False)
    except KeyboardInterrupt:
        _take_back(folder, started, console)
        raise
    return world


def _prepare(folder: Path, want: Wish) -> None:
    """Run what the engine needs first (packages, a model). Each of them talks for itself, on stderr."""
    found = None
    with contextlib.suppress(NoWorld):
        found = load_description(folder)
    kept = found[1] if found is not None and want.engine is None else None
    engine = want.engine or (found[1].engine if found is not None else ECHO)
    model, options = (kept.model, kept.options) if kept is not None else ("", ())
    said = (want.model or model, want.options or options)
    for command in needs(engine, *said) if engine in ENGINES else ():
        words = [*weir_command(), *command]
        done = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=sys.stderr, check=False)
        if done.returncode:
            asked = f"weir {' '.join(command)}"
            raise WeirError(
                f"engine {engine}", f"{asked} ended with {done.returncode}", f"see above; then {asked}"
            )
    if engine in ENGINES and (want.model or want.options or want.settings):
        _check(engine, want)


def _check(engine: str, want: Wish) -> None:
    """Ask an executor about model, options and settings before a world is made of them: nine would die of it
    again and again, and the world would remember."""
    words = [*weir_command(), *check_words(engine, want.model or "", want.options or (), want.settings or ())]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False, text=True)
    if done.returncode:
        why, _, way_out = done.stderr.strip().removeprefix("error ").partition("\n  way out: ")
        raise UsageError(f"engine {engine}", why, way_out or "see weir executor --help")


def _start(
    folder: Path, want: Wish, only: str | None, regions_dir: Path | None, started: Started
) -> tuple[World, tuple[str, ...]]:
    find_programs()
    with down.locked(folder, LOCK_WAIT_S), create.settled(folder, want, regions_dir) as world:
        names = world.spec.names if only is None else (only,)
        if only is not None:
            _check_primary_first(world, only)
        running = world.running
        missing = tuple(name for name in names if name not in running)
        for name in missing:
            down.clear_region(world.layout, name)
        needed = [
            each
            for name in missing
            for each in world.address(name).listeners(world.spec.total, http=world.spec.http)
        ]
        ports.refuse_taken(needed, world.spec.number)
        for name in missing:
            started.supervisors[name] = _spawn(world, name)
        for name, process in started.supervisors.items():
            _wait_for_lock(world, name, process)
        for name in set(names) & set(running):
            _release_held(world, name)
    return world, names


def _check_primary_first(world: World, region: str) -> None:
    """A secondary's Connect CA is signed by the primary's; the first time it can't come up without it."""
    primary = world.spec.primary
    initialised = (world.layout.region(region).consul_data / "raft").exists()
    if region != primary and primary not in world.running and not initialised:
        raise Refused(
            f"region {region}",
            f"the primary datacenter {primary} isn't up, and a new region gets its CA from there",
            f"apply {primary} first (weir region up {primary})",
        )


def _spawn(world: World, region: str) -> subprocess.Popen[bytes]:
    paths = world.layout.region(region)
    paths.logs.mkdir(parents=True, exist_ok=True)
    marks = {MARKER: str(world.folder), "WEIR_REGION": region, "WEIR_PROCESS": "supervisor"}
    with paths.log("supervisor").open("ab") as log:
        return subprocess.Popen(
            [*weir_command(), "region", "run", region, "--world", str(world.folder)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **marks},
            cwd=world.folder,
            start_new_session=True,
        )


def _wait_for_lock(world: World, name: str, process: subprocess.Popen[bytes]) -> None:
    """Until a supervisor holds its lock: from then on another `weir up` sees that the region runs."""
    if not patience.until(lambda: world.supervisor(name) is not None or process.poll() is not None, 30):
        raise _failed(world, name, "supervisor", "didn't start within 30 s")
    _check_alive(world, name, process)


def _release_held(world: World, region: str) -> None:
    """A drill that was killed may have left processes held down; bringing up means all of them."""
    with contextlib.suppress(SupervisorGone):
        world.control(region).release("*")


def _wait(world: World, names: Sequence[str], started: Started, console: Console, timeout_s: float) -> None:
    began = patience.now()
    with Progress(console) as progress:
        while True:
            found = {name: _ask(world, name) for name in names}
            elapsed = patience.now() - began
            progress.show(found, elapsed)
            ready = [name for name, status in found.items() if status is not None and status.ready]
            if len(ready) == len(names):
                return
            try:
                for name, status in found.items():
                    _check_progress(world, name, status, started.supervisors.get(name))
                if elapsed > timeout_s:
                    raise _late(world, found, timeout_s)
            except WeirError as error:
                if ready:
                    error.exit_code = Exit.PARTIAL
                raise
            patience.pause(LOOK_EVERY_S)


def _ask(world: World, region: str) -> RegionStatus | None:
    try:
        return world.control(region).region()
    except SupervisorGone:
        return None


def _check_progress(
    world: World, name: str, status: RegionStatus | None, process: subprocess.Popen[bytes] | None
) -> None:
    if process is not None:
        _check_alive(world, name, process)
    for part, row in (status.processes if status is not None else {}).items():
        if row.state is not State.READY and row.restarts >= TOO_MANY_RESTARTS:
            why = row.error or f"died {row.restarts} times, the last time with status {row.last_exit}"
            raise _failed(world, name, part, why)


def _check_alive(world: World, region: str, process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        raise _failed(world, region, "supervisor", f"ended with status {process.returncode}")


def _late(world: World, found: dict[str, RegionStatus | None], timeout_s: float) -> WeirError:
    for name, status in found.items():
        if status is None:
            return _failed(world, name, "supervisor", f"doesn't answer after {timeout_s:g} s")
        for part, row in status.processes.items():
            if row.state is not State.READY and row.state is not State.WAITING:
                trouble = f"; {status.trouble}" if status.trouble else ""
                return _failed(world, name, part, f"still {row.state} after {timeout_s:g} s{trouble}")
    late = ", ".join(name for name, status in found.items() if status is None or not status.ready)
    return WeirError(
        late, f"not ready after {timeout_s:g} s: instances don't pass their checks", "weir status"
    )


def _failed(world: World, region: str, part: str, why: str) -> WeirError:
    log = world.layout.region(region).log(part)
    with contextlib.suppress(OSError):
        lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        why = "\n".join([why, *(f"    | {line}" for line in lines)])
    return WeirError(f"region {region}: {part}", why, f"see {log}; then weir up again, or weir down")


def _take_back(folder: Path, started: Started, console: Console) -> None:
    """Stop what this call started; a second Ctrl-C makes it quick."""
    if not started.supervisors:
        return
    console.print(
        f"interrupted: stopping what was started ({', '.join(started.supervisors)})", soft_wrap=True
    )
    try:
        for process in started.supervisors.values():
            process.terminate()
        for process in started.supervisors.values():
            process.wait(timeout=down.SUPERVISOR_GRACE_S)
    except (KeyboardInterrupt, subprocess.TimeoutExpired):
        for process in started.supervisors.values():
            process.kill()
            process.wait()
    world = World.load(folder)
    for name in started.supervisors:
        strays.end(strays.find(world.folder, name))
        down.clear_region(world.layout, name)
    console.print("stopped; nothing of it is left", soft_wrap=True)
