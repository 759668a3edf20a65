"""`active.json`: what is broken right now and how to heal it, on disk before it is broken.

Law: written (and synced) before an injection, removed only after the healing was proven. Whoever finds
it without the drill's lock being held knows that a drill died, and heals first.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from drills.faults.base import FaultSpec
from regions.cli.errors import WeirError


@dataclass(frozen=True, slots=True)
class Active:
    """A drill under way. by: who runs it. started: ISO time."""

    drill: str
    name: str
    by: str
    started: str
    faults: tuple[FaultSpec, ...] = ()


class ActiveFile:
    def __init__(self, folder: Path) -> None:
        self.path = folder / "active.json"

    def write(self, active: Active) -> None:
        """Replace the file as a whole and make sure that it is on the disk."""
        body = {
            "schema_version": 1,
            "drill": active.drill,
            "name": active.name,
            "by": active.by,
            "started": active.started,
            "faults": [
                {"do": f.do, "target": f.target, "service": f.service, "params": dict(f.params)}
                for f in active.faults
            ],
        }
        new = self.path.with_suffix(".new")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with new.open("w", encoding="utf-8") as file:
                json.dump(body, file, indent=2)
                file.flush()
                os.fsync(file.fileno())
            new.replace(self.path)
        except OSError as error:
            raise WeirError(
                str(self.path),
                error.strerror or "can't be written",
                "free disk space; nothing was broken yet",
            ) from error

    def read(self) -> Active | None:
        """What a drill left, None when nothing. Raises WeirError when the file can't be understood."""
        try:
            text = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        try:
            body: dict[str, Any] = json.loads(text)
            drill = str(body["drill"])
            faults = tuple(
                FaultSpec(f["do"], f["target"], f["service"], drill, MappingProxyType(dict(f["params"])))
                for f in body["faults"]
            )
            return Active(drill, str(body["name"]), str(body["by"]), str(body["started"]), faults)
        except (ValueError, KeyError, TypeError) as error:
            raise WeirError(
                str(self.path),
                f"it tells of an unfinished drill, but can't be understood ({error!r})",
                "heal by hand (`weir down && weir up` if in doubt), then remove the file",
            ) from error

    def clear(self) -> None:
        self.path.unlink(missing_ok=True)
