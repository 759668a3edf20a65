"""What a stream shows of itself: frozen views for status pages, the traffic manager and tests.

Law: data only. Times are unix seconds here (the core counts in monotonic seconds; the caller gives the
offset).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from mesh.xds.resource_set import Resource


@dataclass(frozen=True, slots=True)
class TypeState:
    """One type on one stream.

    desired, sent, acked: fingerprints of all resources of the type (`fingerprint`); None = none yet. acked
    is the last desired state that the client has accepted in full, so `applied` is `acked == desired`.
    pending_nonce, pending_since: the un-ACKed push, if any. nack, nack_since: words of the last NACK while
    the trouble lasts. held: why something is not sent now. quarantined: refused resource → reason.
    resources: how many the client is known to have.
    """

    type_url: str
    desired: str | None
    sent: str | None
    acked: str | None
    pending_nonce: str | None = None
    pending_since: float | None = None
    nack: str | None = None
    nack_since: float | None = None
    held: str | None = None
    quarantined: Mapping[str, str] | None = None
    resources: int = 0

    @property
    def applied(self) -> bool:
        """Whether this client has accepted all that is desired of this type."""
        return self.desired is not None and self.acked == self.desired


@dataclass(frozen=True, slots=True)
class StreamState:
    """One ADS stream. since: when it was opened; changed: last ACK, NACK or push."""

    proxy_id: str
    since: float
    changed: float
    types: Mapping[str, TypeState]

    @property
    def alarm(self) -> str | None:
        """The reason that a person should look at this proxy, or None."""
        for state in self.types.values():
            if state.nack is not None:
                return f"{state.type_url.rsplit('.', 1)[-1]}: rejected: {state.nack}"
        return None

    @property
    def applied(self) -> bool:
        """Whether everything this client asked for is in force there."""
        return bool(self.types) and all(state.applied for state in self.types.values())


def fingerprint(group: Mapping[str, Resource] | None) -> str | None:
    """16 hex digits over names and versions of the resources of one type; None stays None."""
    if group is None:
        return None
    digest = hashlib.sha256()
    for name in sorted(group):
        digest.update(f"{name}\0{group[name].version}\n".encode())
    return digest.hexdigest()[:16]
