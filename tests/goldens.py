"""Goldens: rendered text kept under tests/golden/ and compared byte for byte.

Law: a golden is only written with `--update-goldens`, and then the difference is reviewed as prose. Use the
fixtures of tests/conftest.py: `golden(name, text)` and `golden_json(name, value)`; name: a path below
tests/golden/, such as "intentions/config-entries.json".
"""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "golden"


@dataclass(frozen=True, slots=True)
class Goldens:
    """Compares with the files of `folder`, or writes them when `update` is set."""

    folder: Path
    update: bool = False

    def check(self, name: str, text: str) -> None:
        """Raise AssertionError with a unified diff unless the golden `name` is exactly `text`."""
        path = self._path(name)
        if self.update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        if not path.is_file():
            raise AssertionError(
                f"no golden {name}: run pytest with --update-goldens and review the new file"
            )
        kept = path.read_text(encoding="utf-8")
        if kept != text:
            raise AssertionError(
                f"golden {name} differs (--update-goldens accepts):\n{diff(name, kept, text)}"
            )

    def check_json(self, name: str, value: Any) -> None:
        """`check` of `value` as indented JSON with sorted keys."""
        self.check(name, as_text(value))

    def _path(self, name: str) -> Path:
        path = (self.folder / name).resolve()
        if not path.is_relative_to(self.folder.resolve()):
            raise ValueError(f"a golden lies below {self.folder}: {name!r}")
        return path


def as_text(value: Any) -> str:
    """JSON with sorted keys and a newline at the end: the same value, the same bytes."""
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def diff(name: str, kept: str, text: str) -> str:
    lines = difflib.unified_diff(
        kept.splitlines(), text.splitlines(), f"golden/{name}", "rendered now", lineterm=""
    )
    return "\n".join(lines) or "(only the line ends differ)"
