"""Engines behind the Engine protocol, each in a file of its own, none imported unless used.

Law: a table of names and nothing heavy at import time.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from regions.cli.errors import UsageError
from services.engine import Engine

ENGINES: Mapping[str, str] = {
    "echo": "services.engines.echo:make",
    "sim": "services.engines.sim:make",
    "torch": "services.engines.torch:make",
    "vllm": "services.engines.vllm:make",
    "openai": "services.engines.openai:make",
}
"""Name → `module:function`; the function takes (model, options as text) and gives an Engine, not started."""


def make_engine(name: str, options: Mapping[str, str], model: str = "") -> Engine:
    """The engine of this name. model: name or path, as the engine reads it.

    Raises UsageError for an unknown name, model or option.
    """
    if name not in ENGINES:
        raise UsageError(f"engine {name!r}", "unknown", f"known: {', '.join(sorted(ENGINES))}")
    module, _, function = ENGINES[name].partition(":")
    engine: Engine = getattr(import_module(module), function)(model, options)
    return engine
