"""What the mesh knows, frozen: the MeshSnapshot and its parts.

Law: pure. Stdlib data modules, `regions.model` and `intentions.model` only. Weights here are integers
in basis points (1/10,000), ports are TCP, addresses are IP literals. A MeshSnapshot is never changed,
only replaced (`dataclasses.replace`), and `check()` refuses one that contradicts itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from intentions.model import Intention
from regions.model import RegionSet

FULL = 10_000
"""Basis points in the whole: the weights of one route add up to this."""

STABLE, CANARY = "stable", "canary"


class Health(StrEnum):
    """Health of an endpoint as Consul tells it, plus what the instance says of itself: DRAINING (it still
    answers) and ASLEEP (it can't, and wakes some day)."""

    PASSING = "passing"
    WARNING = "warning"
    CRITICAL = "critical"
    DRAINING = "draining"
    ASLEEP = "asleep"


class ProxyKind(StrEnum):
    INGRESS = "ingress"
    MESH_GATEWAY = "mesh-gateway"
    SIDECAR = "sidecar"


@dataclass(frozen=True, slots=True, order=True)
class Endpoint:
    """One instance of a service as other proxies see it: the public (mTLS) port of its sidecar."""

    service: str
    region: str
    stage: str
    instance: str
    """Consul service id of the instance, unique in its region."""
    address: str
    port: int
    zone: str = ""
    version: str = ""
    model: str = ""
    tenant_class: str = ""
    health: Health = Health.PASSING
    weight: int = 1


@dataclass(frozen=True, slots=True, order=True)
class Gateway:
    """A mesh gateway of some region: where other regions' traffic for it goes in (SNI passthrough)."""

    region: str
    instance: str
    address: str
    port: int
    health: Health = Health.PASSING


@dataclass(frozen=True, slots=True, order=True)
class Proxy:
    """An Envoy of THIS region that may ask for xDS, as registered in Consul.

    id: Envoy node id = Consul service id of the proxy registration.
    service: Connect service name whose leaf it gets: the instance's service for a sidecar,
        `ingress-gateway` / `mesh-gateway` for gateways.
    token_sha256: hex digest of the secret that its ADS stream must present (metadata `x-weir-proxy-token`);
        the secret itself never enters Consul.
    address, port: public listener. local_address, local_port: the application behind a sidecar.
    """

    id: str
    kind: ProxyKind
    service: str
    address: str
    port: int
    token_sha256: str
    local_address: str = ""
    local_port: int = 0
    stage: str = ""
    zone: str = ""
    meta: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}), compare=False)


@dataclass(frozen=True, slots=True)
class Leaf:
    """A Connect leaf certificate with its private key. `repr` shows neither."""

    service: str
    cert_pem: str = field(repr=False)
    key_pem: str = field(repr=False)
    uri: str = ""
    serial: str = ""
    not_after: str = ""


@dataclass(frozen=True, slots=True)
class Roots:
    """All trusted Connect CA roots (old and new during a rotation)."""

    trust_domain: str
    pems: tuple[str, ...]
    active_id: str = ""


@dataclass(frozen=True, slots=True)
class RetrySpec:
    """Retries at the ingress: only while no response byte has been sent on."""

    attempts: int = 3
    budget_percent: float = 20.0
    """Share of active requests that may be retries at one time (Envoy retry_budget)."""
    min_concurrency: int = 256
    """So many retries at one time are always allowed, per cluster. When a group freezes, EVERY request in
    flight to it becomes a retry at the same moment: with less than rate x detection time (about 2 s) requests
    fail (measured at 100 requests/s and two frozen sidecars: 10 lost a third of them, 256 none)."""
    base_interval_ms: int = 100
    """Each retry waits anything up to this, 3 x, 7 x (Envoy's jitter). A refused connection costs no time, so
    that the waits are all there is for the ejection of a dead group to overtake its requests: at 25 ms on a
    busy machine a request was seen to spend its three retries in 30 ms, before the ejection."""


@dataclass(frozen=True, slots=True)
class RateLimitSpec:
    """Token bucket per ingress Envoy; over it the answer is 429 with `retry-after`."""

    requests_per_second: int = 5_000
    burst: int = 10_000
    retry_after_s: int = 1


@dataclass(frozen=True, slots=True)
class CircuitSpec:
    max_connections: int = 4_096
    max_pending: int = 4_096
    max_requests: int = 8_192


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """A service as its owner describes it (services/catalog/<name>.yaml).

    idle_timeout_s: a stream with no byte for this long is cut (never a total limit: token streams are long).
    first_byte_timeout_s: no response byte within this time counts as a failed try and may be retried.
    capacity_rps: requests per second that a healthy instance is declared to carry (see mesh.traffic.safety).
    dye_header: whether `x-weir-dye` may pin a tester to a stage.
    """

    name: str
    prefix: str
    health_path: str = "/health"
    idle_timeout_s: float = 60.0
    first_byte_timeout_s: float = 15.0
    capacity_rps: float = 500.0
    dye_header: bool = True
    retry: RetrySpec = field(default_factory=RetrySpec)
    rate_limit: RateLimitSpec = field(default_factory=RateLimitSpec)
    circuit: CircuitSpec = field(default_factory=CircuitSpec)


@dataclass(frozen=True, slots=True, order=True)
class Slice:
    """A run of the hash space [0, FULL) that goes to one (region, stage). Order matters: it is the layout."""

    region: str
    stage: str
    weight: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """A KV value that is not in force, and why. `key` is the full KV key."""

    key: str
    reason: str
    kv_index: int = 0


@dataclass(frozen=True, slots=True)
class TrafficPlan:
    """What the ingress does for one service: the slices in layout order, adding up to FULL.

    layout: runs before health and evacuation ((region, stage), weight), kept so that sessions come home.
    refusals: values that were not taken. kv_index: highest KV index this plan has seen.
    """

    service: str
    slices: tuple[Slice, ...]
    canary_weight: float
    canary_key: str
    region_shares: Mapping[str, float]
    evacuated: tuple[str, ...] = ()
    layout: tuple[tuple[tuple[str, str], int], ...] = ()
    refusals: tuple[Refusal, ...] = ()
    kv_index: int = 0
    reason: str = ""

    def check(self) -> None:
        """Raise SnapshotError unless weights are positive integers adding up to FULL."""
        if any(s.weight <= 0 for s in self.slices) or sum(s.weight for s in self.slices) != FULL:
            raise SnapshotError(
                f"plan of {self.service}: weights must be positive and add up to {FULL}: {self.slices}"
            )


class SnapshotError(ValueError):
    """The snapshot contradicts itself and must not be served; the last good one stays."""


@dataclass(frozen=True, slots=True)
class MeshSnapshot:
    """Everything the xDS builders need for the proxies of one region.

    region: the region whose proxies are served. endpoints and gateways are of ALL regions.
    proxies, leafs: of this region only (leafs by service name).
    """

    region: str
    regions: RegionSet
    services: tuple[ServiceSpec, ...] = ()
    endpoints: tuple[Endpoint, ...] = ()
    gateways: tuple[Gateway, ...] = ()
    proxies: Mapping[str, Proxy] = field(default_factory=lambda: MappingProxyType({}))
    intentions: tuple[Intention, ...] = ()
    roots: Roots | None = None
    leafs: Mapping[str, Leaf] = field(default_factory=lambda: MappingProxyType({}))
    plans: Mapping[str, TrafficPlan] = field(default_factory=lambda: MappingProxyType({}))

    def service(self, name: str) -> ServiceSpec | None:
        return next((s for s in self.services if s.name == name), None)

    def of(self, service: str, region: str, stage: str) -> tuple[Endpoint, ...]:
        """Endpoints of one (service, region, stage), in a stable order."""
        return tuple(
            sorted(e for e in self.endpoints if (e.service, e.region, e.stage) == (service, region, stage))
        )

    def check(self) -> None:
        """Raise SnapshotError on a reference that points nowhere."""
        known = set(self.regions.names)
        if self.region not in known:
            raise SnapshotError(f"snapshot of unknown region {self.region!r}")
        for plan in self.plans.values():
            plan.check()
            for piece in plan.slices:
                if piece.region not in known:
                    raise SnapshotError(f"plan of {plan.service}: unknown region {piece.region!r}")
        for end in self.endpoints:
            if end.region not in known:
                raise SnapshotError(f"endpoint {end.instance}: unknown region {end.region!r}")


def as_json(value: Any) -> Any:
    """Plain JSON data of a frozen value, keys sorted; private keys are left out. For goldens and hashes."""
    from dataclasses import fields, is_dataclass

    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: as_json(getattr(value, f.name)) for f in fields(value) if f.name != "key_pem"}
    if isinstance(value, Mapping):
        return {str(k): as_json(v) for k, v in sorted(value.items())}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [as_json(v) for v in value]
    return value
