"""What one client wants of one type, and what it has: the subscription rules of delta xDS.

Law: pure, no time. Knows nothing of order between types, of nonces or of rejections; `stream.py` asks it
for the difference between what is desired and what the client has, and tells it what was sent and taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mesh.xds import order
from mesh.xds.resource_set import Resource
from mesh.xds.wire import BadRequest, Request

MAX_NAMES = 20_000
"""Most names that one client may ask for within a type; beyond it somebody tries to fill our memory."""


@dataclass(frozen=True, slots=True)
class Held:
    """A resource as the client has it.

    version: None when the client may have the old or the new one (a rejected update can be applied in part).
    resource: None when only the version is known (told on reconnect) or not even that.
    """

    version: str | None
    resource: Resource | None


class Subscription:
    """State of one type on one stream."""

    __slots__ = ("absent", "asked", "known", "must_answer", "named", "owed", "type_url", "wildcard")

    def __init__(self, type_url: str) -> None:
        self.type_url = type_url
        self.asked = False
        """Whether any request of this type has come on this stream."""
        self.wildcard = False
        self.named: set[str] = set()
        """Explicit names; remembered also while nothing of that name exists."""
        self.known: dict[str, Held] = {}
        self.absent: set[str] = set()
        """Explicit names of which the client was told that they do not exist."""
        self.owed: set[str] = set()
        """Names to be answered even if unchanged: asked for (again), or EDS after a change of its cluster."""
        self.must_answer = False
        """A first wildcard request gets an answer, if need be an empty one: Envoy's start waits for it."""

    def apply(self, request: Request, *, sure: bool) -> None:
        """Take the subscription changes of a request.

        sure: whether equal versions in `initial_resource_versions` mean that the client needs nothing. Not so
        for EDS or SDS asked for before CDS on a new stream: Envoy keeps CDS back while clusters warm, so it
        is likely to be waiting for exactly this answer.
        """
        first = not self.asked
        self.asked = True
        if first:
            self._begin(request)
        for name in request.subscribe:
            if name == "*":
                self.must_answer = self.must_answer or not self.wildcard
                self.wildcard = True
                continue
            if len(self.named) >= MAX_NAMES and name not in self.named:
                raise BadRequest(f"more than {MAX_NAMES} names of {self.type_url}")
            self.named.add(name)
            self.absent.discard(name)
            if not (first and sure and name in request.initial_versions):
                self.owed.add(name)
        for name in request.unsubscribe:
            self._leave(name)

    def _begin(self, request: Request) -> None:
        nothing_named = not request.subscribe and not request.unsubscribe
        # Only a first request may mean "everything" by naming nothing; later the same bytes are a bare ACK.
        if nothing_named and self.type_url in order.WILDCARD_TYPES:
            self.wildcard = self.must_answer = True
        if len(request.initial_versions) > MAX_NAMES:
            raise BadRequest(f"more than {MAX_NAMES} initial versions of {self.type_url}")
        wanted = set(request.subscribe)
        everything = self.wildcard or "*" in wanted
        for name, version in request.initial_versions.items():
            if everything or name in wanted:
                self.known[name] = Held(version, None)

    def _leave(self, name: str) -> None:
        if name == "*":
            self.wildcard = False
            self.known = {n: held for n, held in self.known.items() if n in self.named}
            return
        self.named.discard(name)
        self.absent.discard(name)
        self.owed.discard(name)
        if self.wildcard:
            # The client let go of the name but still wants all: it must be told what "all" says about it.
            self.owed.add(name)
        else:
            self.known.pop(name, None)

    def wants(self, name: str) -> bool:
        return self.wildcard or name in self.named

    def accepted(self, name: str) -> bool:
        """Whether the client surely has some version of this resource."""
        held = self.known.get(name)
        return held is not None and held.version is not None

    def owe(self, names: Iterable[str]) -> None:
        """Answer these again even if unchanged, where the client wants them."""
        self.owed.update(name for name in names if self.wants(name))

    def changed(self, target: Mapping[str, Resource]) -> list[Resource]:
        """Resources to send, sorted by name: differing from what the client has, or owed."""
        interest = target if self.wildcard else self.named & target.keys()
        return [target[n] for n in sorted(interest) if n in self.owed or self.differs(target[n])]

    def vanished(self, target: Mapping[str, Resource]) -> list[str]:
        """Names to remove, sorted: the client has them, or asked for them, and they do not exist."""
        gone = {name for name in self.known if name not in target}
        gone |= {name for name in self.named if name not in target and name not in self.absent}
        gone |= {name for name in self.owed if name not in target}
        return sorted(gone)

    def differs(self, resource: Resource) -> bool:
        """Whether the client has another version than this one, or none, or we cannot tell."""
        held = self.known.get(resource.name)
        return held is None or held.version != resource.version

    def bind(self, group: Mapping[str, Resource]) -> None:
        """Remember the content of told versions, while the group that holds it is still at hand."""
        for name, held in self.known.items():
            if held.resource is None and name in group and group[name].version == held.version:
                self.known[name] = Held(held.version, group[name])

    def last_good(self, names: Iterable[str]) -> dict[str, Resource]:
        """What the client has of these, where we know its content."""
        held = ((name, self.known.get(name)) for name in names)
        return {name: h.resource for name, h in held if h is not None and h.resource is not None}

    def took(self, upserts: Iterable[Resource], removed: Iterable[str]) -> None:
        """The client ACKed. Names it left meanwhile are not remembered: it will ask anew."""
        for resource in upserts:
            if self.wants(resource.name):
                self.known[resource.name] = Held(resource.version, resource)
                self.absent.discard(resource.name)
        for name in removed:
            self.known.pop(name, None)
            if name in self.named:
                self.absent.add(name)

    def distrust(self, names: Iterable[str]) -> None:
        """The client may have these in any version, told or not: an earlier update was rejected in part."""
        for name in names:
            if self.wants(name):
                self.known[name] = Held(None, None)

    def doubt(self, upserts: Iterable[Resource], removed: Iterable[str], culprits: frozenset[str]) -> None:
        """The client NACKed. Envoy may have applied the good ones, so only what it refused is surely the
        old."""
        for resource in upserts:
            if resource.name not in culprits and self.wants(resource.name):
                self.known[resource.name] = Held(None, None)
        for name in removed:
            if self.wants(name):
                self.known.setdefault(name, Held(None, None))
