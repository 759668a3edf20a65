"""Heavy Python packages that weir can do without: installed when somebody asks, never before.

Law: runs pip of the interpreter it runs in and looks at what is installed; imports none of the packages.
What is installed is what requirements-models.lock pins, and pip resolves nothing: a resolver may take a build
of torch for another kind of machine, gigabytes of it.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path

from regions.cli.errors import UsageError, WeirError

Say = Callable[[str], None]
TAIL = 8
_LOCK = "requirements-models.lock"


def pins(text: str) -> dict[str, str]:
    """Package → version of a lock file's lines; comments and blank lines aside."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return {name: version for name, _, version in (line.partition("==") for line in lines if "==" in line)}


def missing(wanted: Mapping[str, str]) -> tuple[str, ...]:
    """Those that aren't installed in that version. A local part (`+cpu`) is not compared."""
    return tuple(name for name, version in wanted.items() if _installed(name) != version)


def _installed(name: str) -> str:
    try:
        return metadata.version(name).partition("+")[0]
    except metadata.PackageNotFoundError:
        return ""


def lock_file() -> Path:
    """Of this checkout, or beside the installed package. Raises WeirError."""
    path = Path(__file__).resolve().parent.parent / _LOCK
    if not path.is_file():
        raise WeirError(_LOCK, f"not in {path.parent}", "pip install 'weir[torch]', which asks for the same")
    return path


def torch(say: Say) -> None:
    """torch and what loads models. Raises WeirError with the end of what pip said."""
    lock = lock_file()
    wanted = pins(lock.read_text())
    absent = missing(wanted)
    if absent:
        say(f"installing {len(absent)} packages for the torch engine (about 1 GB on disk; a minute or two)")
        _pip("--no-deps", "--requirement", str(lock))
    if absent or importlib.util.find_spec("torch") is None:
        _must_import(say, wanted["torch"])


def _must_import(say: Say, version: str) -> None:
    """A build for CUDA needs libraries that the lock leaves out: they are fetched where that makes sense."""
    if _imports():
        return
    if os.environ.get("CI"):
        raise WeirError("torch", "does not import as installed", "give CI a torch built for the CPU")
    say("this torch is built for a GPU; fetching its libraries (gigabytes)")
    _pip(f"torch=={version}")
    if not _imports():
        raise WeirError("torch", "is installed and does not import", f"{sys.executable} -c 'import torch'")


def _imports() -> bool:
    return (
        subprocess.run([sys.executable, "-c", "import torch"], capture_output=True, check=False).returncode
        == 0
    )


def _pip(*what: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet", "install"]
    done = subprocess.run([*command, *what], capture_output=True, text=True, check=False)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if not line.startswith("WARNING")][-TAIL:]
        raise WeirError(
            "pip install", "\n".join(said) or "failed", "check the network, the disk and pip config list"
        )


def steps() -> dict[str, metadata.EntryPoint]:
    """What `weir setup --with` knows: the entry points of the group `weir.extras`, each a callable(say)."""
    return {found.name: found for found in metadata.entry_points(group="weir.extras")}


def install(name: str, say: Say) -> None:
    """Raises UsageError for an unknown name, WeirError when it can't be had."""
    known = steps()
    if name not in known:
        raise UsageError(f"--with {name}", "unknown", "known are " + ", ".join(sorted(known)))
    known[name].load()(say)
