"""What must not be done to traffic without force, and why.

Law: pure. Each rule returns the reason for a refusal or None; none of them acts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mesh.model import CANARY, STABLE, ServiceSpec


@dataclass(frozen=True, slots=True)
class Outlook:
    """What is known when a change is judged.

    healthy: healthy instances by (region, stage). rps: requests per second of all ingresses together,
    None when nothing was measured. shares, evacuated, canary: the values after the change.
    """

    service: ServiceSpec
    healthy: Mapping[tuple[str, str], int]
    shares: Mapping[str, float]
    evacuated: tuple[str, ...]
    canary: float
    rps: float | None = None


def judge(before: Outlook, after: Outlook) -> tuple[str, ...]:
    """Every reason to refuse the step from `before` to `after`, in the order a person should read them."""
    rules = (_somebody_left, _healthy_receivers, _canary_exists, _capacity)
    return tuple(reason for rule in rules if (reason := rule(before, after)))


def taking(outlook: Outlook) -> dict[str, float]:
    """Share by region after evacuation, adding up to 1 (empty when nobody is left)."""
    open_regions = {r: s for r, s in outlook.shares.items() if r not in outlook.evacuated}
    if open_regions and not any(open_regions.values()):
        # All weight sat on the evacuated ones: the plan spreads it over the rest evenly.
        open_regions = dict.fromkeys(open_regions, 1.0)
    total = sum(open_regions.values())
    return {r: s / total for r, s in open_regions.items()} if total else {}


def _somebody_left(before: Outlook, after: Outlook) -> str | None:
    if taking(after):
        return None
    return f"{after.service.name}: no region would take traffic; the last one can't be evacuated"


def _healthy_receivers(before: Outlook, after: Outlook) -> str | None:
    old, new = taking(before), taking(after)
    dead = [r for r in sorted(new) if new[r] > old.get(r, 0) and not after.healthy.get((r, STABLE), 0)]
    if not dead:
        return None
    return (
        f"{after.service.name}: {', '.join(dead)} would get more traffic but has no healthy stable instance"
    )


def _canary_exists(before: Outlook, after: Outlook) -> str | None:
    if after.canary <= before.canary:
        return None
    if any(after.healthy.get((r, CANARY), 0) for r in taking(after)):
        return None
    return f"{after.service.name}: no region that takes traffic has a healthy canary instance"


def _capacity(before: Outlook, after: Outlook) -> str | None:
    if after.rps is None:
        return None
    old, new = taking(before), taking(after)
    over = []
    for region in sorted(new):
        instances = sum(n for (r, _), n in after.healthy.items() if r == region)
        capacity = instances * after.service.capacity_rps
        load = after.rps * new[region]
        if new[region] > old.get(region, 0) and load > capacity:
            over.append(f"{region} would get {load:.0f} requests/s and is declared for {capacity:.0f}")
    return f"{after.service.name}: {'; '.join(over)}" if over else None
