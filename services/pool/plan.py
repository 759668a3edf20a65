"""The pool as Consul tells it: who stands where, and what may be put to sleep.

Law: pure; takes Consul's JSON and status documents, gives values and decisions with reasons. An entry that
makes no sense is left out and told.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mesh.model import STABLE
from services.pool.lru import Sleeper

READY, ASLEEP = "ready", "asleep"
CRITICAL = "critical"


@dataclass(frozen=True, slots=True, order=True)
class Member:
    """One instance. lifecycle: as registered. health: worst of its checks. slept_at: unix seconds or 0."""

    region: str
    instance: str
    stage: str
    lifecycle: str
    health: str = "passing"
    device: str = ""
    admin: str = ""
    slept_at: int = 0
    model: str = ""

    @property
    def takes_traffic(self) -> bool:
        return self.lifecycle == READY and self.health != CRITICAL

    @property
    def shown(self) -> str:
        """One word for people: a dead one is dead whatever it was registered as."""
        return "unreachable" if self.health == CRITICAL else self.lifecycle


def members(rows: Any, region: str) -> tuple[tuple[Member, ...], tuple[str, ...]]:
    """`/v1/health/service/<name>` of one region → (members, what made no sense)."""
    found, problems = [], []
    for number, row in enumerate(rows if isinstance(rows, list) else []):
        try:
            found.append(_member(row, region))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            problems.append(f"{region}: entry {number} makes no sense: {error!r}")
    return tuple(sorted(found)), tuple(problems)


def _member(row: Mapping[str, Any], region: str) -> Member:
    service, meta = row["Service"], row["Service"].get("Meta") or {}
    seen = {check["Status"] for check in row.get("Checks") or ()}
    health = next((status for status in (CRITICAL, "warning") if status in seen), "passing")
    return Member(
        region=region,
        instance=str(service["ID"]),
        stage=meta.get("stage") or STABLE,
        lifecycle=meta.get("lifecycle") or READY,
        health=health,
        device=meta.get("device", ""),
        admin=meta.get("admin", ""),
        slept_at=int(meta.get("slept_at") or 0),
        model=meta.get("model", ""),
    )


def sleepers(services: Mapping[str, Any]) -> tuple[Sleeper, ...]:
    """Who sleeps, of all services, from `/v1/agent/services`; sidecars are no instances."""
    found = []
    for id_, row in services.items():
        meta = row.get("Meta") or {}
        if row.get("Kind") or "weir_kind" in meta or meta.get("lifecycle") != ASLEEP:
            continue
        try:
            at = int(meta.get("slept_at") or 0)
            found.append(Sleeper(id_, meta.get("device", ""), at, meta.get("host", "")))
        except ValueError:
            continue
    return tuple(found)


def share(document: Mapping[str, Any] | None, region: str, stage: str) -> float | None:
    """Share of its ingress' requests that go to (region, stage), from the region's status document; None
    where nobody knows."""
    slices = (document or {}).get("slices")
    if not isinstance(slices, list):
        return None
    try:
        total = sum(float(weight) for _, _, weight in slices)
        mine = sum(float(w) for r, s, w in slices if (r, s) == (region, stage))
    except (TypeError, ValueError):
        return None
    return mine / total if total else 0.0


def why_keep(who: Member, pool: Iterable[Member], traffic: float | None) -> str:
    """Why this instance may not go to sleep without force, or empty.

    traffic: share that goes to its (region, stage), None where nobody knows: then it is taken for some.
    """
    if not who.takes_traffic:
        return ""
    same = [m for m in pool if (m.region, m.stage) == (who.region, who.stage) and m.takes_traffic]
    others = [m for m in same if m.instance != who.instance]
    if others or traffic == 0.0:
        return ""
    known = "nobody knows how much traffic it has" if traffic is None else f"it has {traffic:.0%} of traffic"
    return f"it is the last ready {who.stage} instance of {who.region}, and {known}"


def find(pool: Iterable[Member], instance: str, region: str = "") -> tuple[Member, ...]:
    """All members of this id, in this region where one is named."""
    return tuple(m for m in pool if m.instance == instance and region in ("", m.region))


def as_json(member: Member) -> dict[str, Any]:
    return {
        "region": member.region,
        "instance": member.instance,
        "stage": member.stage,
        "state": member.shown,
        "lifecycle": member.lifecycle,
        "health": member.health,
        "device": member.device or None,
        "admin": member.admin or None,
        "slept_at": member.slept_at or None,
        "model": member.model,
    }
