"""The vllm engine by name: options and a model's folder become an engine.

Law: reads options and looks for the folder; starts nothing before `start`.
"""

from __future__ import annotations

from collections.abc import Mapping

from mesh.clock import SystemClock
from services.models.store import find
from services.vllm.engine import VllmEngine
from services.vllm.settings import parse


def make(model: str, options: Mapping[str, str]) -> VllmEngine:
    """model: a name in the store, or the path of a folder; served under that name. Raises UsageError."""
    return VllmEngine(parse(options), model, find(model), SystemClock())
