"""Has a change arrived? Status documents of all regions in, an answer with names and reasons out.

Law: pure. "Applied" = every connected proxy acknowledged; "observed" = measured shares within tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mesh.traffic.safety import Outlook, taking

MIN_REQUESTS = 50
"""Fewer observed requests than this say nothing about a share."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """applied, observed: None = can't be known (no traffic). details: by region, in words."""

    applied: bool
    observed: bool | None
    details: Mapping[str, str]
    share: float | None = None
    requests: int = 0
    took_s: float = 0.0


def judge(
    wanted: Outlook, documents: Mapping[str, Any], regions: tuple[str, ...], tolerance: float
) -> Outcome:
    """documents: status/traffic/<service>/<region> by region, missing where none could be read."""
    details = {r: _lag(wanted, documents.get(r)) for r in regions}
    applied = not any(details.values())
    if not applied:
        return Outcome(False, None, {r: why for r, why in details.items() if why})
    requests, canary, by_region = _sum(documents, regions)
    if requests < MIN_REQUESTS:
        return Outcome(True, None, {}, None, requests)
    off = _deviations(wanted, requests, canary, by_region, tolerance)
    return Outcome(True, not off, off, canary / requests, requests)


def _lag(wanted: Outlook, body: Any) -> str:
    """Why this region has not applied what is wanted; "" when it has."""
    if not isinstance(body, Mapping):
        return "no status document: its control plane or its Consul doesn't answer"
    refusals = [f"{r['key']}: {r['reason']}" for r in body.get("refusals", ())]
    same = (
        math.isclose(body["canary_weight"]["value"], wanted.canary, abs_tol=1e-9)
        and sorted(body["evacuated"]) == sorted(wanted.evacuated)
        and all(math.isclose(body["regions"].get(r, 0.0), s, abs_tol=1e-5) for r, s in wanted.shares.items())
    )
    if not same:
        return "; ".join(["still on the values before", *refusals])
    nacks = [f"{n['proxy']} refused: {n['reason']}" for n in body.get("nacks", ())]
    if nacks:
        return "; ".join(nacks)
    if not body["connected"]:
        return "no ingress proxy is connected to its control plane"
    if body["acknowledged"] < body["connected"]:
        told = f"{body['acknowledged']} of {body['connected']} proxies acknowledged"
        behind = ", ".join(body.get("behind", ()))
        return f"{told}; not yet: {behind}" if behind else told
    return ""


def _sum(documents: Mapping[str, Any], regions: tuple[str, ...]) -> tuple[int, float, dict[str, float]]:
    requests, canary, by_region = 0, 0.0, dict[str, float]()
    for region in regions:
        seen = documents[region].get("observed", {})
        count = int(seen.get("requests", 0))
        requests += count
        canary += count * float(seen.get("canary") or 0.0)
        for name, share in (seen.get("regions") or {}).items():
            by_region[name] = by_region.get(name, 0.0) + count * float(share)
    return requests, canary, by_region


def _deviations(
    wanted: Outlook, requests: int, canary: float, by_region: Mapping[str, float], tolerance: float
) -> dict[str, str]:
    """Shares further off than the tolerance and than three standard errors of so few requests."""
    pairs = {"canary": (canary / requests, wanted.canary)}
    for region, share in taking(wanted).items():
        pairs[region] = (by_region.get(region, 0.0) / requests, share)
    out = {}
    for name, (got, want) in pairs.items():
        allowed = max(tolerance, 3 * math.sqrt(max(want * (1 - want), 1e-6) / requests))
        if abs(got - want) > allowed:
            out[name] = (
                f"observed {got:.3f}, wanted {want:.3f} (tolerance {allowed:.3f}, {requests} requests)"
            )
    return out
