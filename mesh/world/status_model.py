"""The status of a world as one JSON object (the form that other tools rely on), from facts already gathered.

Law: pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mesh.model import CANARY, STABLE, Endpoint, Health
from mesh.world.spec import SERVICE, WorldSpec


@dataclass(frozen=True, slots=True)
class RegionFacts:
    """What was learned about one region. documents: service → its status document of this region.

    processes: process → state. error: why Consul could not be asked, or empty. resting: instance → lifecycle,
    of those that take no request by their own word.
    """

    ready: bool = False
    supervisor: int | None = None
    processes: Mapping[str, str] = field(default_factory=dict)
    endpoints: tuple[Endpoint, ...] = ()
    documents: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    error: str = ""
    resting: Mapping[str, str] = field(default_factory=dict)


def status(spec: WorldSpec, ca_file: str, found: Mapping[str, RegionFacts]) -> dict[str, Any]:
    """{"regions": …, "traffic": …}; every region of the world is there, known or not."""
    services = sorted({SERVICE, *(name for facts in found.values() for name in facts.documents)})
    return {
        "regions": {
            name: _region(spec, name, ca_file, found.get(name, RegionFacts()), services)
            for name in spec.names
        },
        "traffic": {service: _traffic(spec, service, found) for service in services},
    }


def _region(
    spec: WorldSpec, name: str, ca_file: str, facts: RegionFacts, services: Sequence[str]
) -> dict[str, Any]:
    where = spec.addresses(name)
    return {
        "ready": facts.ready,
        "consul": where.consul_http,
        "ingress": where.ingress_https,
        "ca_file": ca_file,
        "services": {service: _stages(facts.endpoints, service) for service in services},
        "admin": where.ingress_admin,
        "metrics": where.ingress_metrics,
        "supervisor": facts.supervisor,
        "processes": dict(facts.processes),
        "error": facts.error or None,
        "resting": dict(facts.resting),
    }


def _stages(endpoints: Sequence[Endpoint], service: str) -> dict[str, dict[str, int]]:
    mine = [e for e in endpoints if e.service == service]
    stages = sorted({STABLE, CANARY, *(e.stage for e in mine)}, key=lambda s: (s != STABLE, s))
    return {
        stage: {
            "instances": sum(e.stage == stage for e in mine),
            "healthy": sum(e.stage == stage and e.health is Health.PASSING for e in mine),
        }
        for stage in stages
    }


def _traffic(spec: WorldSpec, service: str, found: Mapping[str, RegionFacts]) -> dict[str, Any]:
    documents = {
        name: facts.documents[service]
        for name, facts in found.items()
        if facts.ready and service in facts.documents
    }
    # All regions come to the same values; while a change travels, the one that decided last is ahead.
    newest = max(documents.values(), key=_decided, default={})
    return {
        "canary_weight": newest.get("canary_weight"),
        "regions": newest.get("regions", {}),
        "evacuated": newest.get("evacuated", []),
        "per_region": {name: _applied(documents.get(name)) for name in spec.names},
        "observed": _observed([d["observed"] for d in documents.values() if d.get("observed")]),
    }


def _decided(document: Mapping[str, Any]) -> float:
    return float((document.get("times") or {}).get("decided") or 0.0)


def _applied(document: Mapping[str, Any] | None) -> dict[str, Any]:
    if document is None:
        return {"applied": False, "acknowledged": 0, "connected": 0, "refusal": "no status from this region"}
    reasons = [f"{r['key']}: {r['reason']}" for r in document.get("refusals", ())]
    reasons += [f"{n['proxy']} refused: {n['reason']}" for n in document.get("nacks", ())]
    return {
        "applied": bool(document.get("applied")),
        "acknowledged": document.get("acknowledged", 0),
        "connected": document.get("connected", 0),
        "refusal": "; ".join(reasons) or None,
    }


def _observed(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Shares over all ingresses, each weighted by its requests; canary is None when nothing flowed."""
    total = sum(int(p.get("requests") or 0) for p in parts)
    if not total:
        return {"canary": None, "regions": {}, "requests": 0}
    shares: dict[str, float] = {}
    canary = 0.0
    for part in parts:
        requests = int(part.get("requests") or 0)
        canary += requests * float(part.get("canary") or 0.0)
        for name, share in (part.get("regions") or {}).items():
            shares[name] = shares.get(name, 0.0) + requests * float(share)
    return {
        "canary": round(canary / total, 4),
        "regions": {name: round(value / total, 4) for name, value in sorted(shares.items())},
        "requests": total,
    }
