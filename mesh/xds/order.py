"""The order in which types are pushed on one stream, as a table with its reasons.

Law: pure data and one lookup. `stream.py` walks PUSH_ORDER from top to bottom each time it looks for work;
a row that cannot go now (something it must follow is not there yet) is skipped, never waited for, so that
what Envoy needs to finish warming (EDS, SDS) always finds its way past what is held.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from mesh.xds import names


class What(Enum):
    """Which half of a difference a row of the table may send."""

    UPSERT = auto()
    REMOVE = auto()
    BOTH = auto()


class Gate(Enum):
    """What must be true of a single resource before it goes out."""

    OPEN = auto()
    """Never held: Envoy may be warming on exactly this, and would not ACK what comes before until it has
    it."""
    CLUSTERS_READY = auto()
    """Every cluster it refers to was accepted by this client (Envoy ACKs CDS only once clusters are warm),
    and no changed endpoints of these clusters are still unsent."""
    UNUSED = auto()
    """No listener or route that this client has, or may have, refers to it."""
    CLUSTER_GONE = auto()
    """The client has given up the cluster of this name."""


@dataclass(frozen=True, slots=True)
class Step:
    """One row: type, which half, the gate, and why it stands where it stands."""

    type_url: str
    what: What
    gate: Gate
    why: str


PUSH_ORDER: tuple[Step, ...] = (
    Step(names.CLUSTER, What.UPSERT, Gate.OPEN, "routes are not warmed: their clusters must be there first"),
    Step(names.ENDPOINT, What.UPSERT, Gate.OPEN, "a new or changed cluster warms until its EDS comes"),
    Step(names.SECRET, What.BOTH, Gate.OPEN, "clusters and listeners warm until their secrets come"),
    Step(names.LISTENER, What.BOTH, Gate.CLUSTERS_READY, "a TCP proxy or route table inside names clusters"),
    Step(names.ROUTE, What.BOTH, Gate.CLUSTERS_READY, "traffic moves only to clusters that are ready"),
    Step(names.CLUSTER, What.REMOVE, Gate.UNUSED, "a cluster goes only after the last route to it has gone"),
    Step(
        names.ENDPOINT, What.REMOVE, Gate.CLUSTER_GONE, "endpoints outlive their cluster, never the reverse"
    ),
)

KNOWN_TYPES = frozenset(step.type_url for step in PUSH_ORDER)

USERS_OF_CLUSTERS = (names.LISTENER, names.ROUTE)
"""Types whose resources send traffic to clusters."""

WILDCARD_TYPES = frozenset({names.CLUSTER, names.LISTENER})
"""Types for which a first request without names means "everything" (xds_protocol, "How the client
specifies…")."""

NEVER_EMPTIED = WILDCARD_TYPES
"""Types of which the last resource is never taken away: a sudden nothing is a fault of the read, not an
order."""


def steps_for(type_url: str) -> tuple[Step, ...]:
    """Rows of one type, in order; a type we do not serve gets one open row, so that it is answered at all."""
    rows = tuple(step for step in PUSH_ORDER if step.type_url == type_url)
    return rows or (Step(type_url, What.BOTH, Gate.OPEN, "not served: answered so that nobody waits"),)
