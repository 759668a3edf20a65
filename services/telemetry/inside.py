"""The engines inside an engine, for figures that only one of them has.

Law: reads; knows the shapes that wrappers have (`inner`, `engine`, `parts`) and none of their types.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

from services.batching.model import BatchingCounts
from services.engine import Engine


@runtime_checkable
class Batches(Protocol):
    """An engine behind a scheduler (services/batching)."""

    def counts(self) -> BatchingCounts: ...


@runtime_checkable
class HasUpstream(Protocol):
    """An engine whose tokens a server makes."""

    def upstream_metrics(self) -> str: ...


def layers(engine: Engine, role: str = "primary") -> Iterator[tuple[str, Engine]]:
    """(role, engine), outermost first. role: "primary", or "secondary" inside of a fallback's second one."""
    yield role, engine
    parts = getattr(engine, "parts", None)
    if parts is not None:
        primary, secondary = parts
        yield from layers(primary, role)
        yield from layers(secondary, "secondary")
        return
    inner = getattr(engine, "inner", None) or getattr(engine, "engine", None)
    if inner is not None and hasattr(inner, "generate"):
        yield from layers(inner, role)


def reason_of(engine: Engine, request_id: str) -> str:
    """Why a second engine answers this request, or empty."""
    for _, layer in layers(engine):
        # Once per answer, so no isinstance of a Protocol: that costs ten times as much.
        if (tell := getattr(layer, "reason_of", None)) is not None:
            return str(tell(request_id))
    return ""


def upstream_metrics(engine: Engine) -> str:
    """Metrics of the servers behind the innermost engines, in Prometheus' text form; empty without."""
    # Wrappers may pass the call on: asking all of them would tell everything twice.
    told = [layer for _, layer in layers(engine) if isinstance(layer, HasUpstream)]
    innermost = [one for one in told if not any(inner in told for _, inner in list(layers(one))[1:])]
    return "".join(one.upstream_metrics() for one in innermost)
