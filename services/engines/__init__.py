"""Engines behind the Engine protocol, each in a file of its own, none imported unless used.

Law: a table of names and nothing heavy at import time.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from regions.cli.errors import UsageError
from services.engine import Engine

ENGINES: Mapping[str, str] = {"echo": "services.engines.echo:make"}
"""Name → `module:function`; the function takes the options as text and gives an Engine."""


def make_engine(name: str, options: Mapping[str, str]) -> Engine:
    """The engine of this name. Raises UsageError for an unknown name or a bad option."""
    if name not in ENGINES:
        raise UsageError(f"engine {name!r}", "unknown", f"known: {', '.join(sorted(ENGINES))}")
    module, _, function = ENGINES[name].partition(":")
    engine: Engine = getattr(import_module(module), function)(options)
    return engine
