"""From KV values, health and reachability to the slices of one service.

Law: pure and total: every input gives a plan with a reason, also when everything is broken.
Three steps, each a function: resolve (values in force and refusals), layout (who owns what when all is well),
overlay (what health and evacuation change, without forgetting the layout, so that sessions come home).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeVar

from mesh.consul import keys
from mesh.model import CANARY, STABLE, Refusal, Slice, TrafficPlan
from mesh.traffic import slots
from mesh.traffic.values import ValueRefused, parse_canary, parse_evacuated, parse_shares
from regions.model import RegionSet

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Value:
    """A KV value as it stands in Consul. index: its ModifyIndex."""

    raw: bytes
    index: int


@dataclass(frozen=True, slots=True)
class ConfigPage:
    """All of config/traffic/ at one moment.

    marker: whether the folder key itself is there (see mesh.consul.keys.CONFIG).
    index: X-Consul-Index of the read, so that a page can be told to be older than a record.
    """

    values: Mapping[str, Value] = field(default_factory=lambda: MappingProxyType({}))
    marker: bool = True
    index: int = 0


@dataclass(frozen=True, slots=True)
class Effective:
    """The values in force for one service."""

    canary: float
    canary_key: str
    shares: Mapping[str, float]
    evacuated: tuple[str, ...]
    refusals: tuple[Refusal, ...]
    kv_index: int


def resolve(service: str, page: ConfigPage, last_good: Mapping[str, bytes], regions: RegionSet) -> Effective:
    """Which values are in force: the one in KV if it is valid, else the last good one, else the default.

    last_good: value by config key from the epoch records, which survive a restart. With the marker gone a
    missing key is a fault of the read, so the last good value counts there as well.
    """
    refusals: list[Refusal] = []

    def read(key: str, parse: Callable[[bytes], T]) -> T | None:
        entry = page.values.get(key)
        if entry is not None:
            try:
                return parse(entry.raw)
            except ValueRefused as refused:
                refusals.append(Refusal(key, str(refused), entry.index))
        elif not page.marker and key in last_good:
            refusals.append(
                Refusal(key, "vanished together with the whole of config/traffic/; last good value kept")
            )
        else:
            return None
        return _last(key, parse, last_good)

    names = regions.names
    own, default = keys.canary_weight(service), keys.DEFAULT_CANARY
    canary_own, canary_default = read(own, parse_canary), read(default, parse_canary)
    canary = next((c for c in (canary_own, canary_default) if c is not None), 0.0)
    shares = read(keys.region_shares(service), lambda raw: parse_shares(raw, names))
    evacuated = read(keys.evacuated(service), lambda raw: parse_evacuated(raw, names))
    return Effective(
        canary=canary,
        canary_key=own if canary_own is not None else default,
        shares=shares or default_shares(regions),
        evacuated=evacuated or (),
        refusals=tuple(refusals),
        kv_index=max((v.index for v in page.values.values()), default=0),
    )


def _last(key: str, parse: Callable[[bytes], T], last_good: Mapping[str, bytes]) -> T | None:
    """The last good value, unless the mesh has changed so that it is no longer one."""
    if key not in last_good:
        return None
    try:
        return parse(last_good[key])
    except ValueRefused:
        return None


def default_shares(regions: RegionSet) -> Mapping[str, float]:
    """Shares from the weights of the region rows."""
    total = sum(r.weight for r in regions.regions)
    return {r.name: r.weight / total for r in regions.regions}


def plan(
    service: str,
    effective: Effective,
    healthy: Mapping[slots.Owner, int],
    down: frozenset[str],
    last: slots.Layout,
) -> TrafficPlan:
    """The slices of one service.

    healthy: healthy instances by (region, stage). down: regions whose path doesn't answer.
    last: the layout of the plan before (TrafficPlan.layout), () when there is none.
    """
    layout = slots.relayout(last, slots.targets(effective.shares, effective.canary))
    out = frozenset(effective.evacuated)
    runs, reason = overlay(layout, healthy, down, out, frozenset(effective.shares))
    result = TrafficPlan(
        service=service,
        slices=tuple(Slice(region, stage, weight) for (region, stage), weight in runs),
        canary_weight=effective.canary,
        canary_key=effective.canary_key,
        region_shares=effective.shares,
        evacuated=effective.evacuated,
        layout=layout,
        refusals=effective.refusals,
        kv_index=effective.kv_index,
        reason=reason,
    )
    result.check()
    return result


def overlay(
    layout: slots.Layout,
    healthy: Mapping[slots.Owner, int],
    down: frozenset[str],
    evacuated: frozenset[str],
    regions: frozenset[str],
) -> tuple[slots.Layout, str]:
    """The layout with runs of unavailable owners lent to others, and why.

    Canary of an emptied stage goes to stable of the same region; a region that is out lends its canary runs
    to canary elsewhere and its stable runs to stable elsewhere, in proportion to what those own already.
    Never from stable to canary: a version is not changed silently.
    """
    up = regions - down - evacuated
    alive = {owner for owner, count in healthy.items() if owner[0] in up and count > 0}
    if not any(stage == STABLE for _, stage in alive):
        # All broken, or nothing known yet: keep what people asked for and let Envoy's own failover try.
        kept = _lend_away(layout, evacuated, regions)
        return kept, "no healthy stable instance in any region that takes traffic"
    runs: list[slots.Run] = []
    lent: dict[slots.Owner, int] = {}
    for owner, weight in layout:
        if owner in alive:
            runs.append((owner, weight))
            continue
        lent[owner] = lent.get(owner, 0) + weight
        runs.extend(_spread(owner, weight, alive, up, slots.owned(layout)))
    return slots.merged(runs), _reason(lent, down, evacuated)


def _spread(
    owner: slots.Owner,
    weight: int,
    alive: set[slots.Owner],
    up: frozenset[str],
    owned: Mapping[slots.Owner, int],
) -> list[slots.Run]:
    region, stage = owner
    if stage == CANARY and region in up and (region, STABLE) in alive:
        return [((region, STABLE), weight)]
    same = {o for o in alive if o[1] == stage} or {o for o in alive if o[1] == STABLE}
    shares = {f"{r}\0{s}": float(owned.get((r, s), 0)) for r, s in same}
    if not sum(shares.values()):
        shares = dict.fromkeys(shares, 1.0)
    parts = slots.apportion(shares, weight)
    return [
        ((name.split("\0")[0], name.split("\0")[1]), part) for name, part in sorted(parts.items()) if part
    ]


def _lend_away(layout: slots.Layout, evacuated: frozenset[str], regions: frozenset[str]) -> slots.Layout:
    """Honour an evacuation even when no health is known: the order of a person outranks our ignorance."""
    left = regions - evacuated
    targets = {owner for owner, _ in layout if owner[0] in left} | {(r, STABLE) for r in left}
    runs: list[slots.Run] = []
    for owner, weight in layout:
        away = owner[0] in evacuated
        runs.extend(_spread(owner, weight, targets, left, slots.owned(layout)) if away else [(owner, weight)])
    return slots.merged(runs)


def _reason(lent: Mapping[slots.Owner, int], down: frozenset[str], evacuated: frozenset[str]) -> str:
    if not lent:
        return "as configured"
    parts = []
    for (region, stage), weight in sorted(lent.items()):
        why = (
            "evacuated" if region in evacuated else "unreachable" if region in down else "no healthy instance"
        )
        parts.append(f"{region}/{stage} {weight / 100:g} % lent: {why}")
    return "; ".join(parts)
