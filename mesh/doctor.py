"""Is this machine fit to run weir? One check per question, each failure with its fix.

Law: looks and tries, changes nothing that outlives the check. A check never raises: a question that
can't be answered is itself an answer with a fix.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from mesh import tools
from mesh.tools import TOOLS, Tool
from mesh.tools_fetch import first_line
from regions.cli.errors import WeirError

MIN_PYTHON = (3, 11)
LOW_DISK_MB, NO_DISK_MB = 2000, 300
# Three regions with their Envoys stay far below; a thousand stub clients of a bench do not.
MIN_OPEN_FILES = 4096
# First, middle and last world a machine can hold (docs/architecture.md, loopback addresses).
LOOPBACKS = ("127.20.1.1", "127.135.1.1", "127.250.1.1")
REQUIRED = ("consul", "envoy")
TRY_TIMEOUT_S = 20.0


class State(StrEnum):
    """ok: nothing to do. warn: weir runs, some part doesn't. fail: weir doesn't run."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Check:
    """One answer. fix is empty when the state is ok."""

    name: str
    state: State
    detail: str
    fix: str = ""


def examine(folder: Path, environ: Mapping[str, str]) -> tuple[Check, ...]:
    """All checks, in the order a person wants to read them. folder: where the state folder would be."""
    checks = [python_version(sys.version_info[:3])]
    checks += [tool(spec, environ) for spec in TOOLS.values()]
    checks += [_disk(folder), _disk(_existing(tools.cache_dir(environ)))]
    checks += [_loopback(), _setpriv(environ), _open_files(), _isolation(environ)]
    return tuple(checks)


def python_version(version: Sequence[int]) -> Check:
    """Judge a Python version."""
    said = ".".join(map(str, version))
    if tuple(version[:2]) >= MIN_PYTHON:
        return Check("python", State.OK, said)
    return Check(
        "python", State.FAIL, f"{said} is too old", "install Python 3.11 or newer, then `make setup`"
    )


def tool(spec: Tool, environ: Mapping[str, str]) -> Check:
    """Is this tool there, and does it start?"""
    bad = State.FAIL if spec.name in REQUIRED else State.WARN
    try:
        path = tools.find(spec.name, environ)
        line = first_line([str(path), *spec.version_args], tools.run_env(spec.name, environ))
    except WeirError as error:
        return Check(spec.name, bad, error.why, error.way_out)
    except (OSError, subprocess.SubprocessError) as error:
        return Check(spec.name, bad, f"doesn't start: {error}", f"set {spec.override} to one that does")
    return tool_version(spec, path, line)


def tool_version(spec: Tool, path: Path, line: str) -> Check:
    """Judge the line in which a program tells its version."""
    # Envoy prints its own path first, and that may hold a version too (python3.11).
    match = re.search(r"\d+(?:\.\d+)+", line.replace(str(path), ""))
    if match is None:
        return Check(
            spec.name, State.WARN, f"{path}: no version in {line!r}", f"set {spec.override} to another"
        )
    bad = State.FAIL if spec.name in REQUIRED else State.WARN
    said = f"{match.group()} ({path})"
    if tuple(map(int, match.group().split("."))) < spec.minimum:
        wanted = ".".join(map(str, spec.minimum))
        fix = f"upgrade it to {wanted} or newer, or set {spec.override} to one"
        return Check(spec.name, bad, f"{said} is too old", fix)
    return Check(spec.name, State.OK, said)


def disk(folder: Path, free_mb: float) -> Check:
    """Judge the free space of a folder, in MB."""
    said = f"{folder}: {free_mb / 1000:.1f} GB free"
    fix = "free some space: a set-up takes 1 GB, a running world some 100 MB and grows with its logs"
    if free_mb < NO_DISK_MB:
        return Check("disk", State.FAIL, said, fix)
    return Check("disk", State.WARN, said, fix) if free_mb < LOW_DISK_MB else Check("disk", State.OK, said)


def _disk(folder: Path) -> Check:
    try:
        return disk(folder, shutil.disk_usage(folder).free / 1e6)
    except OSError as error:
        return Check("disk", State.FAIL, f"{folder}: {error.strerror}", f"make {folder} readable")


def _existing(folder: Path) -> Path:
    """The folder, or its nearest parent that exists."""
    return next(p for p in (folder, *folder.parents) if p.exists())


def _loopback() -> Check:
    for address in LOOPBACKS:
        with socket.socket() as probe:
            try:
                probe.bind((address, 0))
            except OSError as error:
                return Check(
                    "loopback",
                    State.FAIL,
                    f"{address} can't be bound: {error.strerror}",
                    "weir needs 127.0.0.0/8 on `lo`, as Linux has it: `ip addr add 127.0.0.1/8 dev lo`",
                )
    return Check("loopback", State.OK, f"{LOOPBACKS[0]} to {LOOPBACKS[-1]} can be bound")


def _setpriv(environ: Mapping[str, str]) -> Check:
    if path := shutil.which("setpriv", path=environ.get("PATH")):
        return Check("setpriv", State.OK, path)
    return Check("setpriv", State.FAIL, "not on PATH", "install the package util-linux")


def _open_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    said = f"{soft} open files allowed (hard limit {hard})"
    if soft >= MIN_OPEN_FILES:
        return Check("open files", State.OK, said)
    return Check("open files", State.WARN, said, f"`ulimit -n {MIN_OPEN_FILES}` before `weir bench`")


def _isolation(environ: Mapping[str, str]) -> Check:
    """Can a packet filter be set, here or in a user namespace of our own? The cut-off fault needs it."""
    name, fix = "packet filter", "only drills that cut a region off need this: run them as root"
    try:
        iptables = tools.find("iptables", environ)
    except WeirError as error:
        return Check(name, State.WARN, "iptables-legacy is not there", error.way_out)
    # In a fresh network namespace, so that the machine's own tables are not even read.
    inside = ["--net"] if os.geteuid() == 0 else ["--user", "--map-root-user", "--net"]
    command = ["unshare", *inside, str(iptables), "--list-rules"]
    try:
        subprocess.run(
            command,
            env=tools.run_env("iptables", environ),
            capture_output=True,
            text=True,
            timeout=TRY_TIMEOUT_S,
            check=True,
        )
    except subprocess.CalledProcessError as error:
        return Check(name, State.WARN, f"not allowed: {str(error.stderr).strip()[-200:]}", fix)
    except (OSError, subprocess.SubprocessError) as error:
        return Check(name, State.WARN, f"can't be tried: {error}", fix)
    as_whom = "as root" if os.geteuid() == 0 else "in a user namespace"
    return Check(name, State.OK, f"rules can be set {as_whom}")
