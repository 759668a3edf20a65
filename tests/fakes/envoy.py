"""A scripted Envoy that speaks delta ADS and itself checks what a control plane must never do.

Law: no I/O, no clock. Bytes in, bytes out; what Envoy keeps over a reconnect is kept, what it forgets is
forgotten. It is as awkward as Envoy is: it keeps the CDS ACK back while clusters warm, does not ask again for
the endpoints of a changed cluster, applies the good part of an update that it rejects, and goes on telling
the old versions then. Each broken rule raises `Violation` at once, so every test checks the protocol for
free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from envoy.service.discovery.v3 import discovery_pb2

from mesh.xds import names
from mesh.xds.resource_set import ResourceSet, references, unpack
from mesh.xds.stream import Answer, DeltaStream
from mesh.xds.wire import Push, decode_request, encode_body, with_nonce

WILDCARD = (names.CLUSTER, names.LISTENER)
ALL = (names.CLUSTER, names.ENDPOINT, names.LISTENER, names.ROUTE, names.SECRET)


class Violation(AssertionError):
    """The server broke a rule of xDS or made traffic fail."""


@dataclass(frozen=True, slots=True)
class Applied:
    """A resource as this Envoy uses it."""

    version: str
    refs: frozenset[tuple[str, str]]


Reject = Callable[[str, str, str], str | None]
"""(type, name, version) → the error this Envoy has with it, or None."""


def accept_all(_type_url: str, _name: str, _version: str) -> str | None:
    return None


class FakeEnvoy:
    """One Envoy. `connect` and `receive` return the requests that it sends, as bytes."""

    def __init__(
        self, node_id: str = "ingress", reject: Reject = accept_all, *, names_errors: bool = True
    ) -> None:
        self.node_id, self.reject, self.names_errors = node_id, reject, names_errors
        self.config: dict[str, dict[str, Applied]] = {t: {} for t in ALL}
        self.told: dict[str, dict[str, str]] = {t: {} for t in ALL}
        """Versions it would tell on a reconnect; a rejected update does not change them."""
        self.warming: dict[str, set[str]] = {}
        """Cluster → EDS names it still waits for."""
        self.received: list[tuple[str, tuple[str, ...], tuple[str, ...]]] = []
        self.nacks = 0
        self.timeouts: set[str] = set()
        """EDS names that never came; each has cost 15 s of a real Envoy."""
        self.auto_ack = True
        self._reset()

    def _reset(self) -> None:
        self._nonce = 0
        self._first = True
        self._started: set[str] = set()
        self._outstanding: dict[str, str] = {}
        self.withheld: deque[tuple[str, str | None]] = deque()
        self._cds_deferred = False

    # --- what Envoy does ---

    def connect(self, order: Iterable[str] = ALL, *, without: Iterable[str] = ()) -> list[bytes]:
        """A new stream: the first requests, with the versions of what it has."""
        self._reset()
        out = []
        for type_url in order:
            wanted = () if type_url in WILDCARD else tuple(sorted(self._needed(type_url)))
            if type_url == names.CLUSTER and self.warming:
                self._cds_deferred = True  # Envoy asks for CDS again only once its clusters are warm
            elif type_url not in without and (type_url in WILDCARD or wanted):
                out.append(self._begin(type_url, wanted))
        return out

    def _begin(self, type_url: str, wanted: tuple[str, ...]) -> bytes:
        self._started.add(type_url)
        return self.request(type_url, wanted, versions=self.told[type_url])

    def receive(self, data: bytes) -> list[bytes]:
        """Take a response; returns ACK or NACK (if not withheld) and new subscriptions."""
        response = discovery_pb2.DeltaDiscoveryResponse.FromString(data)
        self._check_frame(response)
        type_url = response.type_url
        before = {t: self._needed(t) for t in ALL if t not in WILDCARD}
        self.received.append(
            (type_url, tuple(r.name for r in response.resources), tuple(response.removed_resources))
        )
        errors = self._apply(response)
        if not errors:
            used = self.config[type_url]
            self.told[type_url].update({r.name: r.version for r in response.resources if r.name in used})
            for name in response.removed_resources:
                self.told[type_url].pop(name, None)
        words = "; ".join(errors) if errors else None
        self.nacks += bool(errors)
        self._outstanding[type_url] = response.nonce
        out = self._subscriptions(before)
        if not self.auto_ack:
            return out
        self.withheld.append((type_url, words))
        return out + self.release()

    def release(self) -> list[bytes]:
        """Send the ACKs that may go now: CDS is kept back while clusters warm."""
        out, kept = [], deque[tuple[str, str | None]]()
        while self.withheld:
            type_url, words = self.withheld.popleft()
            if type_url == names.CLUSTER and self.warming:
                kept.append((type_url, words))
                continue
            out.append(self.answer(type_url, words))
        self.withheld = kept
        if self._cds_deferred and not self.warming:
            self._cds_deferred = False
            out.append(self._begin(names.CLUSTER, ()))
        return out

    def answer(self, type_url: str, error: str | None = None) -> bytes:
        """ACK or NACK of the outstanding response of a type."""
        return self.request(type_url, nonce=self._outstanding.pop(type_url), error=error)

    def request(
        self,
        type_url: str,
        subscribe: Iterable[str] = (),
        unsubscribe: Iterable[str] = (),
        *,
        versions: dict[str, str] | None = None,
        nonce: str = "",
        error: str | None = None,
    ) -> bytes:
        """Any request at all; scripts use it for what no sane Envoy would send."""
        message = discovery_pb2.DeltaDiscoveryRequest(
            type_url=type_url,
            resource_names_subscribe=list(subscribe),
            resource_names_unsubscribe=list(unsubscribe),
            initial_resource_versions=versions or {},
            response_nonce=nonce,
        )
        if self._first:
            message.node.id = self.node_id
            self._first = False
        if error is not None:
            message.error_detail.code = 13
            message.error_detail.message = error
        return bytes(message.SerializeToString())

    # --- what it uses ---

    def _needed(self, type_url: str) -> set[str]:
        """Names of a type that its clusters and listeners refer to."""
        users = (*self.config[names.CLUSTER].values(), *self.config[names.LISTENER].values())
        return {name for user in users for kind, name in user.refs if kind == type_url}

    def _subscriptions(self, before: dict[str, set[str]]) -> list[bytes]:
        out = []
        for type_url, had in before.items():
            need = self._needed(type_url)
            for name in had - need:
                self.config[type_url].pop(name, None)
                self.told[type_url].pop(name, None)
            if need == had:
                continue
            if type_url not in self._started:
                out.append(self._begin(type_url, tuple(sorted(need))))
            else:
                out.append(self.request(type_url, sorted(need - had), sorted(had - need)))
        return out

    def _check_frame(self, response: Any) -> None:
        if not response.nonce.isdigit() or int(response.nonce) <= self._nonce:
            raise Violation(f"nonce {response.nonce!r} does not grow (last {self._nonce})")
        self._nonce = int(response.nonce)
        if response.type_url in self._outstanding:
            raise Violation(f"second push of {response.type_url} before the first was answered")
        sent = [r.name for r in response.resources] + list(response.removed_resources)
        if len(sent) != len(set(sent)):
            raise Violation(f"a name twice in one response: {sorted(sent)}")
        for resource in response.resources:
            if resource.resource.type_url != response.type_url:
                raise Violation(f"{resource.name} is of type {resource.resource.type_url}")
        clusters = self.config[names.CLUSTER]
        if (
            response.type_url == names.CLUSTER
            and clusters
            and set(response.removed_resources) >= set(clusters)
        ):
            raise Violation("all clusters taken away at once")

    def _apply(self, response: Any) -> list[str]:
        errors = []
        for resource in response.resources:
            error = self.reject(response.type_url, resource.name, resource.version)
            if error is not None:
                errors.append(f"{resource.name}: {error}" if self.names_errors else error)
                continue
            refs = frozenset(references(unpack(resource.resource)))
            self._check_refs(response.type_url, resource.name, refs)
            self._use(response.type_url, resource.name, Applied(resource.version, refs))
        for name in response.removed_resources:
            self._drop(response.type_url, name)
        return errors

    def _use(self, type_url: str, name: str, applied: Applied) -> None:
        if type_url == names.CLUSTER:
            before = self.config[type_url].get(name)
            if before is None or before.version != applied.version or name in self.warming:
                self.warming[name] = {n for kind, n in applied.refs if kind == names.ENDPOINT}
        if type_url not in WILDCARD and name not in self._needed(type_url):
            return  # crossed with an unsubscription: nobody watches it any more
        self.config[type_url][name] = applied
        if type_url == names.ENDPOINT:
            self._warmed(name)

    def _warmed(self, eds_name: str) -> None:
        for cluster in list(self.warming):
            self.warming[cluster].discard(eds_name)
            if not self.warming[cluster]:
                del self.warming[cluster]

    def _check_refs(self, type_url: str, name: str, refs: frozenset[tuple[str, str]]) -> None:
        if type_url not in (names.ROUTE, names.LISTENER):
            return
        for kind, target in refs:
            if kind == names.CLUSTER and (target not in self.config[names.CLUSTER] or self._is_new(target)):
                raise Violation(f"{name} leads to cluster {target}, which is not there or not warm: 503")

    def _is_new(self, cluster: str) -> bool:
        """Warming for the first time. (A changed one serves with its old self while it warms.)"""
        return cluster in self.warming and cluster not in self.told[names.CLUSTER]

    def _drop(self, type_url: str, name: str) -> None:
        if type_url == names.CLUSTER:
            for kind in (names.LISTENER, names.ROUTE):
                for user, applied in self.config[kind].items():
                    if (names.CLUSTER, name) in applied.refs:
                        raise Violation(f"cluster {name} removed while {user} leads to it: 503")
            self.warming.pop(name, None)
        if type_url == names.ENDPOINT:
            self._warmed(name)  # "there is none": the cluster goes on, empty
            if name in self.config[names.ENDPOINT] and name in self._needed(names.ENDPOINT):
                raise Violation(f"endpoints of {name} taken away under a living cluster")
        self.config[type_url].pop(name, None)

    def fetch_timeout(self) -> list[bytes]:
        """`initial_fetch_timeout` passes: clusters that still warm go on with the endpoints of before, or
        none."""
        self.timeouts |= {name for waits in self.warming.values() for name in waits}
        self.warming.clear()
        return self.release()

    def versions(self) -> dict[str, dict[str, str]]:
        """What it runs on, type → name → version, without empty types."""
        return {t: {n: a.version for n, a in group.items()} for t, group in self.config.items() if group}


def wanted(desired: ResourceSet) -> dict[str, dict[str, str]]:
    """What an Envoy should run on once all of `desired` is in force."""
    return {t: {n: r.version for n, r in group.items()} for t, group in desired.by_type.items() if group}


def on_wire(push: Push) -> bytes:
    """The bytes a client gets."""
    return with_nonce(encode_body(push), push.nonce)


class MemoryLink:
    """A FakeEnvoy and a DeltaStream mouth to ear, with both directions queued in order."""

    def __init__(self, envoy: FakeEnvoy, core: DeltaStream, now: float = 0.0) -> None:
        self.envoy, self.core, self.now = envoy, core, now
        self.to_server: deque[bytes] = deque()
        self.to_client: deque[bytes] = deque()
        self.answers: list[Answer] = []

    def send(self, requests: Iterable[bytes]) -> None:
        """Queue requests of the client."""
        self.to_server.extend(requests)

    def serve_one(self) -> None:
        """The server reads one request."""
        self.answers.append(self.core.request(decode_request(self.to_server.popleft()), self.now))

    def poll(self) -> tuple[Push, ...]:
        """The server writes what it has to."""
        pushes = self.core.poll(self.now)
        self.to_client.extend(on_wire(push) for push in pushes)
        return pushes

    def take_one(self) -> None:
        """The client reads one response and answers."""
        self.send(self.envoy.receive(self.to_client.popleft()))

    def settle(self, limit: int = 10_000) -> None:
        """Run until both sides are silent. Raises Violation when that does not come about."""
        for _ in range(limit):
            if self.to_server:
                self.serve_one()
            elif self.to_client:
                self.take_one()
            elif not self.poll():
                return
        raise Violation(f"no silence after {limit} steps: an endless loop")

    def settle_through_time(self, seconds: float = 60.0) -> None:
        """Settle, letting time pass to each moment the core waits for."""
        end = self.now + seconds
        self.settle()
        while True:
            if self.core.wake_at <= end:
                self.now = max(self.now, self.core.wake_at)
            elif self.envoy.warming:
                self.send(self.envoy.fetch_timeout())
            else:
                return
            self.settle()
