"""Brings the bundles of mesh.tools into the user's cache.

Law: a tree appears whole or not at all (built beside its place, tried, then renamed); one set-up at
a time per cache; nothing outside the cache is written. Talks through the `say` it is given.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from mesh import tools
from mesh.apt import PrivateApt, Source, machine_source
from mesh.tools import BUNDLES, TOOLS, Bundle
from regions.cli.errors import WeirError

Say = Callable[[str], None]
# Documentation is most of some packages and no use in a cache.
USELESS = ("usr/share/doc", "usr/share/man", "usr/share/lintian")
TRY_TIMEOUT_S = 60.0


def missing(names: Sequence[str], environ: Mapping[str, str]) -> list[Bundle]:
    """The bundles to be fetched so that every tool of `names` is there; each once, in order."""
    bundles: dict[str, Bundle] = {}
    for name in names:
        spec = TOOLS[name]
        if spec.bundle and tools.look(spec, environ) is None:
            bundles[spec.bundle] = BUNDLES[spec.bundle]
    return list(bundles.values())


def fetch(bundles: Sequence[Bundle], environ: Mapping[str, str], say: Say) -> None:
    """Bring these bundles into the cache; those already there are left alone.

    Raises WeirError for a full disk, an unreachable mirror, a cache that can't be written, or a
    program that doesn't run on this machine.
    """
    cache = tools.cache_dir(environ)
    try:
        with _only_one(cache, say), _scratch(cache) as scratch:
            wanted = [b for b in bundles if not tools.tree(b.name, environ).exists()]
            if wanted:
                _fetch_all(wanted, scratch, environ, say)
    except OSError as error:
        raise _explain(error, cache) from error


def _fetch_all(bundles: Sequence[Bundle], scratch: Path, environ: Mapping[str, str], say: Say) -> None:
    source = machine_source(environ)
    apts: dict[str, PrivateApt] = {}
    for bundle in bundles:
        suite = bundle.suite or source.own_suite
        if suite not in apts:
            say(f"{bundle.name}: reading the package list of {suite} from {source.uri}")
            apts[suite] = _open_apt(scratch / f"apt-{suite}", source, suite, environ)
        say(f"{bundle.name}: downloading and unpacking {', '.join(bundle.packages)}")
        built = scratch / bundle.name
        built.mkdir()
        apts[suite].unpack(bundle.packages, built)
        for folder in USELESS:
            shutil.rmtree(built / folder, ignore_errors=True)
        said = try_tree(bundle, built, environ)
        place = tools.tree(bundle.name, environ)
        place.parent.mkdir(parents=True, exist_ok=True)
        built.rename(place)
        say(f"{bundle.name}: ready in {place} ({said})")


def _open_apt(folder: Path, source: Source, suite: str, environ: Mapping[str, str]) -> PrivateApt:
    folder.mkdir()
    apt = PrivateApt(folder, source, suite, environ)
    apt.update()
    return apt


def try_tree(bundle: Bundle, root: Path, environ: Mapping[str, str]) -> str:
    """Start every program of a tree once; its first line of output. Raises WeirError if one doesn't run."""
    said = ""
    for spec in TOOLS.values():
        if spec.bundle != bundle.name:
            continue
        program = root / spec.inside
        env = {**environ, **tools.library_env(root, environ)}
        try:
            line = first_line([str(program), *spec.version_args], env)
        except (OSError, subprocess.SubprocessError) as error:
            raise WeirError(
                spec.name,
                f"the fetched program doesn't run here ({error})",
                f"install {spec.name} for this machine and put it on PATH, or set {spec.override}",
            ) from error
        said = said or line
    return said


def first_line(command: Sequence[str], env: Mapping[str, str]) -> str:
    """The first line a program prints; raises OSError or SubprocessError when it fails."""
    done = subprocess.run(
        list(command),
        env=dict(env),
        text=True,
        errors="replace",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=TRY_TIMEOUT_S,
        check=True,
    )
    return next((line.strip() for line in done.stdout.splitlines() if line.strip()), "")


@contextmanager
def _only_one(cache: Path, say: Say) -> Iterator[None]:
    """Hold the cache's lock. The kernel frees it when we die, so a crash leaves nothing to clean."""
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "setup.lock").open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another set-up is at work; waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@contextmanager
def _scratch(cache: Path) -> Iterator[Path]:
    """A folder in the cache (a rename must stay on one disk), gone afterwards. Called under the lock."""
    for left in cache.glob("scratch-*"):
        shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix="scratch-", dir=cache))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _explain(error: OSError, cache: Path) -> WeirError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return WeirError(
            str(cache), "the disk is full", "free some 600 MB, or point XDG_CACHE_HOME elsewhere"
        )
    reason = os.strerror(error.errno) if error.errno else str(error)
    return WeirError(
        str(error.filename or cache),
        f"can't be written: {reason}",
        "point XDG_CACHE_HOME to a folder of yours",
    )
