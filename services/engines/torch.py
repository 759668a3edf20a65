"""The torch engine by name: options and a model's folder become an engine.

Law: reads options and config.json; loads nothing before `start`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from services.llama.settings import parse
from services.models.store import find

if TYPE_CHECKING:
    from services.llama.lifecycle import LlamaEngine


def make(model: str, options: Mapping[str, str]) -> LlamaEngine:
    """model: a name in the store, or the path of a folder. Raises UsageError for an unknown model,
    architecture, option or device."""
    settings = parse(options)
    folder = find(model)
    # torch takes a second to import: not for a mistyped option.
    from services.llama.engine import TorchEngine
    from services.llama.layerwise import LayerwiseEngine
    from services.llama.model import Model

    loaded = Model(model, folder, settings)
    _ = loaded.device
    engine = TorchEngine(loaded)
    return LayerwiseEngine(engine) if settings.mode == "layerwise" else engine
