"""One tick's decision: facts, KV and reachability in; plans and a snapshot out.

Law: pure. The whole of what a control plane decides is here and in what this calls; the rest of the package
only moves data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from mesh import fold
from mesh.consul import keys
from mesh.fold import Facts
from mesh.model import MeshSnapshot, Refusal, TrafficPlan
from mesh.traffic import epochs, plan, values
from mesh.traffic.epochs import Record
from mesh.traffic.plan import ConfigPage
from mesh.traffic.slots import Layout
from mesh.traffic.values import ValueRefused


@dataclass(frozen=True, slots=True)
class Inputs:
    """Everything that a decision rests on.

    records: epoch records of the own datacenter; others: of each other region that could be read.
    down: regions whose path doesn't answer. layouts: layout of the plan before, by service.
    """

    facts: Facts
    page: ConfigPage | None = None
    records: Mapping[str, Record] | None = None
    others: Mapping[str, Mapping[str, Record]] = field(default_factory=lambda: MappingProxyType({}))
    down: frozenset[str] = frozenset()
    layouts: Mapping[str, Layout] | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    snapshot: MeshSnapshot
    plans: Mapping[str, TrafficPlan]


def missing(inputs: Inputs) -> tuple[str, ...]:
    """What the first decision still waits for, in words."""
    own = {
        "config/traffic/": inputs.page,
        "status/epochs/": inputs.records,
        "the last layouts": inputs.layouts,
    }
    return fold.missing(inputs.facts) + tuple(name for name, value in own.items() if value is None)


def decide(inputs: Inputs) -> Decision:
    """Plans of all services and the snapshot. Raises SnapshotError; the caller keeps the last good one."""
    page, records = inputs.page or ConfigPage(), inputs.records or {}
    good = epochs.last_good(records)
    plans: dict[str, TrafficPlan] = {}
    for spec in inputs.facts.services:
        effective = plan.resolve(spec.name, page, good, inputs.facts.regions)
        last = (inputs.layouts or {}).get(spec.name, ())
        healthy = fold.healthy(inputs.facts, spec.name)
        plans[spec.name] = plan.plan(spec.name, effective, healthy, inputs.down, last)
    return Decision(fold.snapshot(inputs.facts, plans), MappingProxyType(plans))


def writes(inputs: Inputs, now: float) -> tuple[epochs.Write, ...]:
    """What this region must write so that all regions agree. now: unix seconds."""
    if inputs.page is None or inputs.records is None:
        return ()
    known = inputs.facts.regions.names

    def valid(key: str, raw: bytes) -> bool:
        try:
            values.check(key, raw, known)
        except ValueRefused:
            return False
        return True

    here, theirs = inputs.facts.region, inputs.others.values()
    return epochs.decide(here, inputs.page, inputs.records, theirs, valid, now)


def strangers(inputs: Inputs) -> tuple[Refusal, ...]:
    """Keys under config/traffic/ that mean nothing (a typing error, a service nobody knows)."""
    names = {spec.name for spec in inputs.facts.services}
    out = []
    for key, value in sorted((inputs.page or ConfigPage()).values.items()):
        service = key.removeprefix(keys.CONFIG).split("/")[0]
        if key == keys.DEFAULT_CANARY:
            continue
        if service not in names:
            known = ", ".join(sorted(names))
            out.append(Refusal(key, f"unknown service {service!r}; known: {known}", value.index))
            continue
        if key not in (keys.canary_weight(service), keys.region_shares(service), keys.evacuated(service)):
            out.append(Refusal(key, "no such setting", value.index))
    return tuple(out)
