"""How commands speak: data on stdout, talk on stderr, one JSON object with `--json`.

Law: no decision here, only printing. Colour only on a terminal and when NO_COLOR is unset.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console

SCHEMA_VERSION = 1


def talk() -> Console:
    """The console for people: stderr, so that stdout stays data."""
    return Console(stderr=True, highlight=False)


def table() -> Console:
    """The console for tables that are the command's result: stdout, plain when piped."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 200)


def emit_json(body: dict[str, Any]) -> None:
    """One object on stdout; `schema_version` is always there and always first."""
    sys.stdout.write(json.dumps({"schema_version": SCHEMA_VERSION, **body}, indent=2, sort_keys=False) + "\n")
    sys.stdout.flush()
