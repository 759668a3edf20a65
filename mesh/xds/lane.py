"""One type on one stream: subscription, the push under way, trouble, and what the client is to have.

Law: pure. Nothing here looks at another type; that is for `gates.py` and `stream.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from mesh.xds import names
from mesh.xds.nack import Quarantine, Trouble
from mesh.xds.resource_set import Resource, ResourceSet
from mesh.xds.state import TypeState, fingerprint
from mesh.xds.subscription import Subscription
from mesh.xds.wire import Push

Group = Mapping[str, Resource]
"""Resources of one type, by name."""

_NOTHING: Group = MappingProxyType({})


class Desired:
    """What is desired of each type. A group with the same content as before stays the same object, so that
    what was compared once is not compared again when only another type has changed."""

    __slots__ = ("_groups",)

    def __init__(self, groups: Mapping[str, Group] = MappingProxyType({})) -> None:
        self._groups = groups

    def of(self, type_url: str) -> Group:
        """The group of a type; empty when there is none."""
        return self._groups.get(type_url, _NOTHING)

    def followed_by(self, newer: ResourceSet) -> Desired:
        """The next state, with unchanged groups kept."""
        groups = {}
        for type_url, group in newer.by_type.items():
            before = self._groups.get(type_url)
            groups[type_url] = before if before is not None and _equal(before, group) else group
        return Desired(groups)


def _equal(before: Group, group: Group) -> bool:
    if before is group:
        return True
    if len(before) != len(group):
        return False
    for name, resource in group.items():
        old = before.get(name)
        if old is not resource and (old is None or old.version != resource.version):
            return False
    return True


class Lane:
    """State of one type on one stream."""

    __slots__ = ("acked", "held", "pending", "pending_at", "quiet", "sent", "sub", "trouble")

    def __init__(self, type_url: str) -> None:
        self.sub = Subscription(type_url)
        self.pending: Push | None = None
        self.pending_at = 0.0
        self.trouble = Trouble()
        self.held: str | None = None
        self.sent: Group | None = None
        self.acked: Group | None = None
        self.quiet: Group | None = None
        """The desired group for which there was nothing left to send; saves comparing it again."""

    def idle(self, group: Group) -> bool:
        """Whether nothing can be sent now, whatever the gates say."""
        return self.pending is not None or not self.sub.asked or self.quiet is group

    def in_force(self, group: Group) -> bool:
        """Whether the client has accepted exactly this and nothing is under way."""
        return self.pending is None and self.acked is group and self.quiet is group

    def target(self, group: Group, quarantine: Quarantine) -> tuple[Group, frozenset[str]]:
        """What this client is to have: the desired, with its last good one in place of what it has refused.

        Second: names that stay as they are, because only the client knows its last good one.
        """
        as_they_are = set()
        for name, what in quarantine.of(self.sub.type_url).items():
            wanted = group.get(name)
            if wanted is None or wanted.version != what.version:
                quarantine.forget(self.sub.type_url, name)
            else:
                as_they_are.add(name)
        if self.sub.type_url == names.ENDPOINT:
            # Envoy lets go of the name with the cluster. As long as it has not, the cluster lives, perhaps
            # one it never told us of, perhaps warming: it is given what it had rather than nothing.
            as_they_are |= (self.sub.named & self.sub.known.keys()) - group.keys()
        if not as_they_are:
            return group, frozenset()
        target = {name: resource for name, resource in group.items() if name not in as_they_are}
        bodies = self.sub.last_good(as_they_are)
        return target | bodies, frozenset(self.sub.known.keys() & as_they_are - bodies.keys())

    def settle(self, group: Group, quarantine: Quarantine) -> None:
        """Note that the client has all there is, if that is so."""
        if self.pending is not None or self.sub.must_answer or self.quiet is group:
            return
        target, kept = self.target(group, quarantine)
        if self.sub.changed(target) or any(name not in kept for name in self.sub.vanished(target)):
            return
        clean = not quarantine.of(self.sub.type_url)
        self.trouble.settled(clean=clean)
        self.quiet, self.held = group, None
        if clean:
            self.acked = group

    def view(self, group: Group | None, quarantine: Quarantine, offset: float) -> TypeState:
        """What there is to show; `offset` turns monotonic into unix seconds."""
        refused = quarantine.of(self.sub.type_url)
        return TypeState(
            type_url=self.sub.type_url,
            desired=fingerprint(group),
            sent=fingerprint(self.sent),
            acked=fingerprint(self.acked),
            pending_nonce=self.pending.nonce if self.pending else None,
            pending_since=self.pending_at + offset if self.pending else None,
            nack=self.trouble.reason or next((r.reason for r in refused.values()), None),
            nack_since=self.trouble.at + offset if self.trouble.reason else None,
            held=self.held,
            quarantined={name: r.reason for name, r in sorted(refused.items())},
            resources=len(self.sub.known),
        )
