"""A copy of terraform/ and regions/ in a test's own folder, and the real Terraform run in it.

Law: nothing is written to the repository; the user's own Terraform settings and variables are shut out.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mesh import tools

TOP = Path(__file__).parents[2]
TERRAFORM = TOP / "terraform"
ROOTS = sorted(p for p in (TERRAFORM / "regions").iterdir() if p.is_dir())
MODULES = sorted(p for p in (TERRAFORM / "modules").iterdir() if p.is_dir())
RUN_TIMEOUT_S = 200


@dataclass(frozen=True)
class House:
    """`folder` is laid out like the repository. variables: given to every run as TF_VAR_…."""

    folder: Path
    variables: dict[str, str] = field(default_factory=dict)

    @classmethod
    def copy(cls, folder: Path, **variables: str) -> House:
        skip = shutil.ignore_patterns(".terraform*", "*.tfstate*", "*.py")
        shutil.copytree(TERRAFORM, folder / "terraform", ignore=skip)
        shutil.copytree(TOP / "regions", folder / "regions", ignore=skip)
        return cls(folder, variables)

    def root(self, name: str) -> Path:
        return self.folder / "terraform" / "regions" / name

    def run(self, name: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """`terraform <arguments>` in the root of region `name`; the caller judges the exit code."""
        env = {k: v for k, v in os.environ.items() if not k.startswith("TF_")}
        env |= {f"TF_VAR_{k}": v for k, v in {**self.variables, **variables}.items()}
        # An empty file: the user's own may name mirrors, or be missing.
        env |= {"TF_CLI_CONFIG_FILE": os.devnull, "TF_IN_AUTOMATION": "1", "CHECKPOINT_DISABLE": "1"}
        return subprocess.run(
            [str(tools.find("terraform")), f"-chdir={self.root(name)}", *arguments],
            env=env,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=RUN_TIMEOUT_S,
            check=False,
        )

    def done(self, name: str, *arguments: str, **variables: str) -> str:
        """Like `run`, but it must succeed; returns what Terraform said."""
        ran = self.run(name, *arguments, **variables)
        assert ran.returncode == 0, f"terraform {' '.join(arguments)} in {name}:\n{ran.stdout}"
        return ran.stdout

    def init(self, name: str) -> None:
        self.done(name, "init", "-input=false", "-no-color")

    def apply(self, name: str, **variables: str) -> None:
        self.done(name, "apply", "-auto-approve", "-input=false", "-no-color", **variables)

    def destroy(self, name: str) -> None:
        self.done(name, "destroy", "-auto-approve", "-input=false", "-no-color")

    def plan(self, name: str, **variables: str) -> tuple[int, str]:
        """Terraform's detailed exit code (0 no changes, 1 error, 2 changes) and what it said."""
        ran = self.run(name, "plan", "-detailed-exitcode", "-input=false", "-no-color", **variables)
        return ran.returncode, " ".join(ran.stdout.split())

    def outputs(self, name: str) -> dict[str, Any]:
        raw = json.loads(self.done(name, "output", "-json"))
        return {key: value["value"] for key, value in raw.items()}
