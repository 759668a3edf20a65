"""Where reports are kept: `<world>/drills/<id>/` with report.json, report.html and the samples.

Law: files only. An id sorts by time, so the latest report is the last name.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from regions.cli.errors import Refused, UsageError, WeirError

JSON_NAME, PAGE_NAME = "report.json", "report.html"


class Store:
    """folder: the world's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "drills"

    def place(self, drill: str) -> Path:
        """The folder of a drill; it need not exist."""
        return self.folder / drill

    def page(self, drill: str) -> Path:
        return self.place(drill) / PAGE_NAME

    def save(self, drill: str, body: dict[str, Any], page: str) -> Path:
        """Write both forms; returns the path of the page. Raises WeirError when the disk says no."""
        path = self.page(drill)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            (path.parent / JSON_NAME).write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")
            path.write_text(page, encoding="utf-8")
        except OSError as error:
            raise WeirError(str(path), error.strerror or "can't be written", "free disk space") from error
        return path

    @contextmanager
    def unless_refused(self, drill: str) -> Iterator[None]:
        """A drill that is refused broke nothing and gets no report: its samples would be found by nobody."""
        try:
            yield
        except Refused:
            shutil.rmtree(self.place(drill), ignore_errors=True)
            raise

    def ids(self) -> tuple[str, ...]:
        """Drills that have a report, oldest first."""
        return tuple(sorted(p.parent.name for p in self.folder.glob(f"*/{JSON_NAME}")))

    def load(self, drill: str) -> dict[str, Any]:
        """A report's JSON by id, by the beginning of one, or `latest`. UsageError when there is none."""
        known = self.ids()
        found = known[-1:] if drill == "latest" else tuple(n for n in known if n.startswith(drill))
        if len(found) != 1:
            why = "no such report" if not found else f"fits {len(found)} reports"
            told = f"known are {', '.join(known[-5:])}" if known else "run one: weir drill run region-loss"
            raise UsageError(f"drill report {drill!r}", why, told)
        body: dict[str, Any] = json.loads((self.folder / found[0] / JSON_NAME).read_text(encoding="utf-8"))
        return body
