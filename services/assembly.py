"""The stack of engines of one executor, made from what `weir executor` was told.

Law: puts parts together, decides nothing. Fallback( Scheduled(primary), Scheduled(secondary) ): the scheduler
stands inside, so that a full queue of the one is a reason to ask the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from mesh.clock import Clock
from regions.cli.errors import UsageError
from services.batching.model import BatchingSettings
from services.batching.scheduled import Scheduled
from services.engine import Engine
from services.engines import make_engine
from services.recipe import Recipe

LAYERWISE = "layerwise"
"""As a second engine: the torch engine's own weights without a KV cache, layer by layer (S14)."""


@dataclass(frozen=True, slots=True)
class Stack:
    """engine, model, options: of the primary. fallback: name of the second engine, "" for none; it serves the
    same model. rules: YAML file of fallback rules, "" for those that ship."""

    engine: str
    model: str
    options: Mapping[str, str]
    fallback: str = ""
    fallback_options: Mapping[str, str] = field(default_factory=dict)
    rules: str = ""
    batching: BatchingSettings = field(default_factory=BatchingSettings)

    @property
    def recipe(self) -> Recipe:
        """What a snapshot keeps of it once its secrets are out."""
        return Recipe(self.engine, self.model, self.options, self.fallback, self.fallback_options, self.rules)

    def made_from(self, recipe: Recipe) -> Stack:
        """The stack of a snapshot's recipe; secrets and the scheduler's settings are this one's."""
        it = recipe.with_secrets_of(self.recipe)
        return Stack(
            it.engine, it.model, it.options, it.fallback, it.fallback_options, it.rules, self.batching
        )


def assemble(stack: Stack, clock: Clock, rng: Random) -> Engine:
    """The outermost engine, not started. Raises UsageError for what makes no sense."""
    primary = make_engine(stack.engine, stack.options, stack.model)
    scheduled = Scheduled(primary, stack.batching, clock, rng)
    if not stack.fallback:
        return scheduled
    # Imported late: most executors have no second engine and start faster without.
    from services.fallback.engine import FallbackEngine
    from services.fallback.rules import DEFAULT_RULES, Rule

    second = Scheduled(_second(stack, primary), stack.batching, clock, rng)
    rules: tuple[Rule, ...] = DEFAULT_RULES
    if stack.rules:
        from services.fallback.rules_file import load_rules

        rules = load_rules(Path(stack.rules))
    return FallbackEngine(scheduled, second, rules, clock, shared=stack.fallback == LAYERWISE)


def _second(stack: Stack, primary: Engine) -> Engine:
    if stack.fallback != LAYERWISE:
        return make_engine(stack.fallback, stack.fallback_options, stack.model)
    if stack.engine != "torch":
        why = f"is a mode of the torch engine, not of {stack.engine}"
        raise UsageError("--fallback layerwise", why, "name a second engine, such as --fallback sim")
    if stack.fallback_options:
        raise UsageError("--fallback-option", "means nothing to layerwise", "it runs with the first engine's")
    from services.llama.engine import TorchEngine
    from services.llama.layerwise import LayerwiseEngine

    if not isinstance(primary, TorchEngine):
        raise UsageError("--fallback layerwise", "the first engine is layerwise already (option mode)")
    return LayerwiseEngine(primary)
