"""What a person wants changed, as one KV write with its consequences spelled out.

Law: pure. A Proposal holds everything a person should see before saying yes; committing it is the manager's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

from mesh.consul import keys
from mesh.traffic import safety
from mesh.traffic.safety import Outlook


@dataclass(frozen=True, slots=True)
class Change:
    """Who asks, why, whether safety rules may be overruled, and from which tool."""

    who: str
    why: str = ""
    force: bool = False
    source: str = "cli"


@dataclass(frozen=True, slots=True)
class Proposal:
    """One write to KV. before, after: text of the value, None for an absent key. index: what CAS must find.

    refusals: reasons of the safety rules; empty means allowed. effect: share of requests by region and of the
    canary, before and after.
    """

    service: str
    key: str
    before: str | None
    after: str | None
    index: int
    refusals: tuple[str, ...]
    effect: Mapping[str, tuple[float, float]]
    outlook: Outlook

    @property
    def changes(self) -> bool:
        return self.before != self.after


def shares_text(shares: Mapping[str, float]) -> str:
    """The JSON that stands in KV for shares."""
    return json.dumps({r: round(s, 6) for r, s in sorted(shares.items())})


def propose(
    key: str, entry: tuple[str | None, int], after: str | None, now: Outlook, then: Outlook
) -> Proposal:
    """The proposal of writing `after` to `key`, judged by the step from `now` to `then`."""
    before, index = entry
    old, new = safety.taking(now), safety.taking(then)
    effect = {r: (old.get(r, 0.0), new.get(r, 0.0)) for r in sorted({*old, *new})}
    effect["canary"] = (now.canary, then.canary)
    return Proposal(then.service.name, key, before, after, index, safety.judge(now, then), effect, then)


def canary(now: Outlook, entry: tuple[str | None, int], weight: float, key: str) -> Proposal:
    return propose(key, entry, f"{weight:g}", now, replace(now, canary=weight))


def shift(now: Outlook, entry: tuple[str | None, int], shares: Mapping[str, float]) -> Proposal:
    """shares: by region, adding up to 1."""
    key = keys.region_shares(now.service.name)
    return propose(key, entry, shares_text(shares), now, replace(now, shares=shares))


def evacuated(now: Outlook, entry: tuple[str | None, int], regions: tuple[str, ...]) -> Proposal:
    """regions: all that shall be evacuated afterwards; none deletes the key."""
    key = keys.evacuated(now.service.name)
    text = json.dumps(sorted(regions)) if regions else None
    return propose(key, entry, text, now, replace(now, evacuated=tuple(sorted(regions))))


def audit_body(
    proposal: Proposal, change: Change, region: str, stamp: str, identity: str
) -> dict[str, object]:
    """The record under audit/traffic/: enough to understand the change and to undo it."""
    return {
        "schema_version": 1,
        "id": f"{stamp}-{identity}",
        "at": stamp,
        "who": change.who,
        "why": change.why,
        "forced": bool(change.force and proposal.refusals),
        "overruled": list(proposal.refusals),
        "source": change.source,
        "region": region,
        "service": proposal.service,
        "key": proposal.key,
        "before": proposal.before,
        "after": proposal.after,
    }
