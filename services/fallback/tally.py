"""How often the second engine answered, why, and for how long.

Law: pure counting; seconds come in as arguments. The names are metric names with labels, as
services/telemetry reads them from EngineStats.extra.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True)
class Count:
    """Of one reason. seconds: served by the secondary, summed over requests. switch_s: from the moment that
    the reason was known to the request being at the secondary; first_s: to the secondary's first token.
    failed: by the secondary, before or after its first token; returned: of those, answered by the primary
    after all."""

    requests: int = 0
    active: int = 0
    failed: int = 0
    returned: int = 0
    seconds: float = 0.0
    switch_s: float = 0.0
    first_s: float = 0.0


class Tally:
    """Counts of all reasons; each reason is there from the start, so that a rate has a zero to begin with."""

    def __init__(self, reasons: Iterable[str]) -> None:
        self.by_reason = {str(reason): Count() for reason in reasons}
        self._engaged_s = 0.0
        self._since: float | None = None

    def enter(self, reason: str, now: float) -> None:
        count = self.by_reason[reason]
        count.requests += 1
        count.active += 1
        if self._since is None:
            self._since = now

    def leave(self, reason: str, entered: float, now: float, *, failed: bool) -> None:
        count = self.by_reason[reason]
        count.active -= 1
        count.failed += failed
        count.seconds += now - entered
        if self._since is not None and not self.active:
            self._engaged_s += now - self._since
            self._since = None

    @property
    def active(self) -> int:
        """Requests at the secondary now."""
        return sum(count.active for count in self.by_reason.values())

    def engaged_s(self, now: float) -> float:
        """Seconds in which at least one request was at the secondary."""
        return self._engaged_s + (now - self._since if self._since is not None else 0.0)

    def figures(self, now: float) -> dict[str, float]:
        """For EngineStats.extra."""
        found: dict[str, float] = {"weir_fallback_engaged_seconds_total": self.engaged_s(now)}
        for reason, count in self.by_reason.items():
            label = f'{{reason="{reason}"}}'
            found[f"weir_fallback_requests_total{label}"] = float(count.requests)
            found[f"weir_fallback_active{label}"] = float(count.active)
            found[f"weir_fallback_failed_total{label}"] = float(count.failed)
            found[f"weir_fallback_returned_total{label}"] = float(count.returned)
            found[f"weir_fallback_seconds_total{label}"] = count.seconds
            found[f"weir_fallback_switch_seconds_total{label}"] = count.switch_s
            found[f"weir_fallback_first_token_seconds_total{label}"] = count.first_s
        return found
