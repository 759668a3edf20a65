"""One delta ADS stream without a socket: requests and the latest ResourceSet in, pushes out.

Law: pure. No I/O, no clock: `now` is monotonic seconds and handed in. At most one un-ACKed push per type;
between publishes only the latest set counts; what is sent is the difference between that set and what this
client has, in the order of `order.PUSH_ORDER`. Nothing changed, nothing sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from mesh.xds import gates, names, order
from mesh.xds.lane import Desired, Group, Lane
from mesh.xds.nack import Quarantine, Refused
from mesh.xds.order import Gate, Step, What
from mesh.xds.resource_set import Resource, ResourceSet
from mesh.xds.state import StreamState
from mesh.xds.wire import BadRequest, Push, Request

MAX_TYPES = 16
"""Types one client may ask for; Envoy has nine."""
SETTLE_S = 5.0
"""How long after opening a stream we wait for LDS and RDS to be asked for before clusters are removed."""
CDS_WITHIN_S = 20.0
"""A stream whose client has not asked for CDS by then is closed (envoy#34334). More than Envoy's
`initial_fetch_timeout` of 15 s, since Envoy keeps CDS back as long as clusters warm."""
NEVER = float("inf")


class Heard(StrEnum):
    """What a request was."""

    ACK = "ack"
    NACK = "nack"
    STALE = "stale"
    SUBSCRIBE = "subscribe"


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request meant. seconds: from push to ACK. reason: the client's words on a NACK."""

    kind: Heard
    type_url: str
    seconds: float = 0.0
    reason: str = ""


class DeltaStream:
    """State of one stream. `wake_at`: monotonic seconds at which `poll` may find work without any event."""

    def __init__(self, proxy_id: str, now: float, quarantine: Quarantine | None = None) -> None:
        self.proxy_id = proxy_id
        self.opened = self.changed = now
        self.wake_at = NEVER
        self._desired: Desired | None = None
        self._lanes: dict[str, Lane] = {}
        self._nonce = 0
        self._quarantine = quarantine if quarantine is not None else Quarantine()
        self._repeat_eds = False
        self._eds_due: set[str] = set()

    # --- in ---

    def publish(self, desired: ResourceSet) -> None:
        """Replace what is desired. Latest wins: what was not sent yet is never sent."""
        before = self._desired or Desired()
        for lane in self._lanes.values():
            lane.sub.bind(before.of(lane.sub.type_url))
        self._desired = before.followed_by(desired)

    def request(self, request: Request, now: float) -> Answer:
        """Take one request. Raises BadRequest when the client asks for more than any Envoy would."""
        lane = self._lane(request.type_url)
        answer = self._hear(lane, request, now)
        cds = self._lanes.get(names.CLUSTER)
        before_cds = cds is None or not cds.sub.asked
        warming = before_cds and request.type_url in (names.ENDPOINT, names.SECRET)
        self._repeat_eds |= before_cds and request.type_url == names.ENDPOINT
        # Also under a stale nonce: in delta a subscription change is never lost with the ACK it came with.
        first = not lane.sub.asked
        lane.sub.apply(request, sure=not warming)
        if first:
            doubts = self._quarantine.doubts
            lane.sub.distrust(name for type_url, name in doubts if type_url == request.type_url)
            if request.type_url == names.ENDPOINT:
                lane.sub.owe(self._eds_due)
        lane.quiet = None
        self._settle(lane)
        return answer

    def _lane(self, type_url: str) -> Lane:
        lane = self._lanes.get(type_url)
        if lane is None:
            if len(self._lanes) >= MAX_TYPES:
                raise BadRequest(f"more than {MAX_TYPES} types on one stream")
            lane = self._lanes[type_url] = Lane(type_url)
        return lane

    def _hear(self, lane: Lane, request: Request, now: float) -> Answer:
        push = lane.pending
        if push is None or request.nonce != push.nonce:
            kind = Heard.STALE if request.nonce else Heard.SUBSCRIBE
            return Answer(kind, request.type_url)
        lane.pending = None
        self.changed = now
        if request.error is None:
            lane.sub.took(push.upserts, push.removed)
            self._quarantine.doubts -= {(push.type_url, n) for n in push.names}
            lane.trouble.acked()
            return Answer(Heard.ACK, request.type_url, now - lane.pending_at)
        blamed = lane.trouble.nacked(push, request.error, now)
        lane.sub.doubt(push.upserts, push.removed, blamed)
        self._quarantine.doubts |= {(push.type_url, n) for n in push.names if n not in blamed}
        for resource in push.upserts:
            if resource.name in blamed:
                refused = Refused(resource.version, request.error, now)
                self._quarantine.add(request.type_url, resource.name, refused)
        return Answer(Heard.NACK, request.type_url, now - lane.pending_at, request.error)

    # --- out ---

    def poll(self, now: float) -> tuple[Push, ...]:
        """What is to be sent now, in this order. Each push counts as sent; call again after any event."""
        self.wake_at = NEVER
        if self._desired is None:
            return ()  # nothing known yet is not the same as nothing: stay silent
        pushes = []
        for step in order.PUSH_ORDER:
            lane = self._lanes.get(step.type_url)
            push = self._try(step, lane, self._desired, now) if lane is not None else None
            if push is not None:
                pushes.append(push)
        for type_url in self._lanes.keys() - order.KNOWN_TYPES:
            (step,) = order.steps_for(type_url)
            push = self._try(step, self._lanes[type_url], self._desired, now)
            if push is not None:
                pushes.append(push)
        return tuple(pushes)

    def _try(self, step: Step, lane: Lane, desired: Desired, now: float) -> Push | None:
        group = desired.of(step.type_url)
        if lane.idle(group):
            return None
        if now < lane.trouble.not_before:
            self.wake_at = min(self.wake_at, lane.trouble.not_before)
            return None
        if step.what is not What.REMOVE:
            lane.held = None
        target, kept = lane.target(group, self._quarantine)
        upserts = self._upserts(step, lane, target, desired)
        removed = self._removals(step, lane, target, kept, now)
        if lane.trouble.batch is not None and upserts:
            upserts, removed = upserts[: lane.trouble.batch], []
        empty_answer = lane.sub.must_answer and step.what is not What.REMOVE and lane.held is None
        if upserts or removed or empty_answer:
            return self._send(lane, group, upserts, removed, now)
        if step is order.steps_for(step.type_url)[-1]:
            self._settle(lane)
        return None

    def _upserts(self, step: Step, lane: Lane, target: Group, desired: Desired) -> list[Resource]:
        if step.what is What.REMOVE:
            return []
        changed = lane.sub.changed(target)
        if step.gate is not Gate.CLUSTERS_READY:
            return changed
        free = []
        for resource in changed:
            why = gates.clusters_ready(resource, desired, self._lanes)
            if why is None:
                free.append(resource)
            lane.held = lane.held or why
        return free

    def _removals(self, step: Step, lane: Lane, target: Group, kept: frozenset[str], now: float) -> list[str]:
        if step.what is What.UPSERT:
            return []
        gone = [name for name in lane.sub.vanished(target) if name not in kept]
        if lane.trouble.frozen and lane.trouble.frozen.issuperset(gone):
            return []
        free = []
        for name in gone:
            # A name that the client does not have is only answered ("there is no such thing"): never held.
            why = self._why_not_remove(step, lane, name, target, now) if name in lane.sub.known else None
            if why is None:
                free.append(name)
            lane.held = lane.held or why
        return free

    def _why_not_remove(self, step: Step, lane: Lane, name: str, target: Group, now: float) -> str | None:
        if step.type_url in order.NEVER_EMPTIED and not target:
            return (
                f"removal of {name} refused: an empty set is taken for a fault of the read, not for an order"
            )
        if step.gate is Gate.UNUSED and self._desired is not None:
            settled_at = self.opened + SETTLE_S
            why = gates.unused(name, self._desired, self._lanes, settling=now < settled_at)
            if why is not None and now < settled_at:
                self.wake_at = min(self.wake_at, settled_at)
            return why
        if step.gate is Gate.CLUSTER_GONE:
            return gates.cluster_gone(name, self._lanes)
        return None

    def _send(
        self,
        lane: Lane,
        group: Group,
        upserts: list[Resource],
        removed: list[str],
        now: float,
    ) -> Push:
        self._nonce += 1
        push = Push(lane.sub.type_url, tuple(upserts), tuple(removed), str(self._nonce))
        lane.pending, lane.pending_at, lane.sent = push, now, group
        lane.sub.must_answer = False
        lane.sub.owed.difference_update(removed, (r.name for r in upserts))
        self.changed = now
        if push.type_url == names.CLUSTER:
            self._eds_again(push)
        return push

    def _eds_again(self, push: Push) -> None:
        """A changed cluster warms anew and gets no endpoints unless they are sent again, changed or not."""
        due = {name for cluster in push.upserts for name in gates.endpoints_of(cluster)}
        eds = self._lanes.get(names.ENDPOINT)
        if eds is None:
            # On a reconnect the first EDS request may cross this push: equal versions in it prove nothing.
            self._eds_due |= due
            return
        eds.sub.owe(due)
        if self._repeat_eds:
            # EDS was asked for first on this stream: its answer may have been taken for the old cluster.
            eds.sub.owe(tuple(eds.sub.named))
            self._repeat_eds = False
        eds.quiet = None

    def _settle(self, lane: Lane) -> None:
        if self._desired is not None:
            lane.settle(self._desired.of(lane.sub.type_url), self._quarantine)

    # --- shown ---

    @property
    def judged_at(self) -> float:
        """Monotonic seconds at which `verdict` may turn against the client; NEVER once it has asked for
        CDS."""
        cds = self._lanes.get(names.CLUSTER)
        return NEVER if cds is not None and cds.sub.asked else self.opened + CDS_WITHIN_S

    def verdict(self, now: float) -> str | None:
        """Why this stream must be closed by us, or None."""
        if now >= self.judged_at:
            return f"no CDS request within {CDS_WITHIN_S:g} s (envoy#34334): reconnect"
        return None

    def state(self, offset: float = 0.0) -> StreamState:
        """A view; `offset` is what has to be added to monotonic seconds to get unix seconds."""
        desired, quarantine = self._desired, self._quarantine
        types = {
            type_url: lane.view(desired.of(type_url) if desired is not None else None, quarantine, offset)
            for type_url, lane in sorted(self._lanes.items())
        }
        return StreamState(self.proxy_id, self.opened + offset, self.changed + offset, types)

    @property
    def restless(self) -> bool:
        """Whether `poll` may find something to send, as far as can be told without looking closely."""
        desired = self._desired
        return desired is not None and any(not lane.idle(desired.of(t)) for t, lane in self._lanes.items())
