"""Intentions ↔ Consul's JSON, for both of its generations.

Law: pure. `service-intentions` config entries for Consul >= 1.9, bodies of /v1/connect/intentions for 1.8,
and the reading of rows, which both generations serve in one shape. Rules that weir can't express (L7
permissions, peers) are never dropped silently: they come out as Foreign, and a config entry keeps them when
it is rewritten.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from intentions.model import Action, Intention
from intentions.plan import pair
from intentions.precedence import by_precedence

KIND = "service-intentions"
Body = dict[str, Any]

_FOREIGN_SOURCE = ("Peer", "SamenessGroup", "Permissions", "SourcePeer", "SourceSamenessGroup")
_COMPUTED = ("Precedence", "LegacyID", "LegacyMeta", "LegacyCreateTime", "LegacyUpdateTime")
"""Consul fills these in itself and (the Legacy ones) refuses them in a write: a rewrite leaves them out."""


@dataclass(frozen=True, slots=True, order=True)
class Foreign:
    """A rule in Consul that isn't ours to express. `why` says what is special about it."""

    destination: str
    source: str
    why: str


def legacy_body(intention: Intention) -> Body:
    """Body of POST /v1/connect/intentions and of PUT /v1/connect/intentions/<id> (Consul 1.8)."""
    return {
        "SourceType": "consul",
        "SourceName": intention.source,
        "DestinationName": intention.destination,
        "Action": intention.action.value,
        "Description": intention.description,
    }


def source_body(intention: Intention) -> Body:
    """One element of `Sources` in a config entry."""
    body = {"Name": intention.source, "Type": "consul", "Action": intention.action.value}
    return body | ({"Description": intention.description} if intention.description else {})


def config_entries(intentions: Iterable[Intention]) -> tuple[Body, ...]:
    """One `service-intentions` entry per destination, sorted; sources in deciding order."""
    rows = sorted(intentions, key=pair)
    return tuple(
        {"Kind": KIND, "Name": name, "Sources": [source_body(i) for i in by_precedence(group)]}
        for name, group in groupby(rows, key=lambda i: i.destination)
    )


def merged_entry(current: Mapping[str, Any] | None, name: str, want: Sequence[Intention]) -> Body | None:
    """The entry of one destination with exactly `want` beside the foreign sources it already has.

    current: the entry as Consul gave it, None when there is none. None is the answer when no source is left:
    Consul refuses an entry without sources, it has to be deleted.
    """
    old: Sequence[Mapping[str, Any]] = (current or {}).get("Sources") or ()
    foreign = [{k: v for k, v in s.items() if k not in _COMPUTED} for s in old if source_is_foreign(s)]
    sources = [source_body(i) for i in by_precedence(want)] + foreign
    if not sources:
        return None
    kept = {k: v for k, v in (current or {}).items() if k in ("Meta", "JWT", "Namespace", "Partition")}
    return {**kept, "Kind": KIND, "Name": name, "Sources": sources}


def entry_intentions(entry: Mapping[str, Any] | None) -> tuple[Intention, ...]:
    """Our own rules in a config entry; foreign sources are left out."""
    if entry is None:
        return ()
    own = (s for s in entry.get("Sources") or () if not source_is_foreign(s))
    return tuple(
        Intention(entry["Name"], s["Name"], Action(s["Action"]), s.get("Description") or "") for s in own
    )


def source_is_foreign(source: Mapping[str, Any]) -> bool:
    """Whether an element of `Sources` (or a listed row) says more than allow or deny between two services."""
    return any(source.get(key) for key in _FOREIGN_SOURCE) or source.get("Action") not in ("allow", "deny")


def read_rows(rows: Iterable[Mapping[str, Any]]) -> tuple[tuple[Intention, ...], tuple[Foreign, ...]]:
    """GET /v1/connect/intentions (any version) → our intentions, and what is foreign; both sorted."""
    ours: list[Intention] = []
    foreign: list[Foreign] = []
    for row in rows:
        destination, source = row["DestinationName"], row["SourceName"]
        if source_is_foreign(row):
            foreign.append(Foreign(destination, source, _why_foreign(row)))
        else:
            ours.append(Intention(destination, source, Action(row["Action"]), row.get("Description") or ""))
    return tuple(sorted(ours)), tuple(sorted(foreign))


def enforceable(ours: Iterable[Intention], foreign: Iterable[Foreign]) -> tuple[Intention, ...]:
    """What proxies enforce: our rules, and a plain deny for each L7 rule, which must never widen access.

    Rules for peers are left out: a peer's identities are of another trust domain, so they match nothing here.
    """
    denies = [Intention(f.destination, f.source, Action.DENY, f.why) for f in foreign if f.why == L7]
    taken = {pair(d) for d in denies}
    return tuple(sorted([*(i for i in ours if pair(i) not in taken), *denies]))


L7 = "a rule with L7 permissions, which weir doesn't read"
_PEER = "a source in a peered cluster or sameness group"


def _why_foreign(row: Mapping[str, Any]) -> str:
    return _PEER if any(row.get(k) for k in _FOREIGN_SOURCE if k != "Permissions") else L7
