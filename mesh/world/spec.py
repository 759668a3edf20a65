"""What a local world is: its number, regions in order, instances per region, switches.

Law: pure. A WorldSpec that exists is consistent. Nothing here looks at a disk, a port or a process;
JSON goes in and out as plain data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from mesh.model import CANARY, STABLE
from mesh.world.addresses import MAX_INSTANCES, RegionAddresses
from mesh.world.engines import ECHO, ENGINES
from regions.model import Cloud, Gateways, Region, RegionSet

SERVICE = "chat"
"""The one service a local world runs."""

_STAGE_VERSIONS = {STABLE: "1.0.0", CANARY: "1.1.0"}


class SpecError(ValueError):
    """The description of the world contradicts itself; the message names the field."""


@dataclass(frozen=True, slots=True)
class Instance:
    """One executor with its sidecar. number: 0-based in its region, stable ones first."""

    number: int
    stage: str
    zone: str
    version: str
    address: str
    model: str = "echo-1"

    @property
    def id(self) -> str:
        """Consul service id."""
        return f"{SERVICE}-{self.stage}-{self.number}"

    @property
    def sidecar_id(self) -> str:
        """Consul service id of the sidecar registration, which is also its Envoy's node id."""
        return f"{self.id}-sidecar-proxy"


@dataclass(frozen=True, slots=True)
class WorldSpec:
    """Everything that decides what runs. `regions` carry their loopback gateways already.

    number: second octet of all addresses. instances, canaries: per region. token_cost_ms: cost of a
    token in the echo engine. model: "" means the engine's own default. options: NAME=VALUE for the engine.
    settings: NAME=VALUE for the executor around it (`weir executor --settings` lists them).
    services_dir: where the control planes read the service catalog.
    intentions_file: what a new world's intentions are taken from.
    tls_cert, tls_key: a given ingress certificate; empty means self-made.
    """

    number: int
    regions: RegionSet
    instances: int = 2
    canaries: int = 1
    http: bool = False
    acl: bool = False
    engine: str = ECHO
    token_cost_ms: float = 2.0
    services_dir: str = ""
    intentions_file: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    model: str = ""
    options: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.instances < 1:
            raise SpecError(f"instances: at least 1 stable instance per region, not {self.instances}")
        if self.canaries < 0:
            raise SpecError(f"canaries: not {self.canaries}")
        if self.total > MAX_INSTANCES:
            raise SpecError(f"instances + canaries: at most {MAX_INSTANCES} per region, not {self.total}")
        if self.engine not in ENGINES:
            raise SpecError(f"engine: no {self.engine!r}; there are {', '.join(ENGINES)}")
        for flag, texts in (("option", self.options), ("set", self.settings)):
            if bad := [text for text in texts if "=" not in text]:
                raise SpecError(f"{flag}: {bad[0]!r} is not NAME=VALUE")
        if bool(self.tls_cert) != bool(self.tls_key):
            raise SpecError("tls-cert and tls-key: give both or neither")
        filled = tuple(self._on_loopback(r) for r in self.regions.regions)
        object.__setattr__(self, "regions", RegionSet(filled))

    @property
    def total(self) -> int:
        """Instances per region, canaries included."""
        return self.instances + self.canaries

    @property
    def names(self) -> tuple[str, ...]:
        return self.regions.names

    @property
    def primary(self) -> str:
        return self.regions.primary.name

    def addresses(self, region: str) -> RegionAddresses:
        """Addresses of a region. Raises KeyError when the world doesn't have it."""
        if region not in self.names:
            raise KeyError(region)
        return RegionAddresses(self.number, self.names.index(region) + 1)

    def members(self, region: str) -> tuple[Instance, ...]:
        """The instances of a region, stable first."""
        row = self.regions.get(region)
        if row is None:
            raise KeyError(region)
        where = self.addresses(region)
        zones = row.zones or (region,)
        stages = [STABLE] * self.instances + [CANARY] * self.canaries
        return tuple(
            Instance(
                number=number,
                stage=stage,
                zone=zones[number % len(zones)],
                version=_STAGE_VERSIONS[stage],
                address=where.instance(number),
                model=self.model or ENGINES[self.engine].model,
            )
            for number, stage in enumerate(stages)
        )

    def _on_loopback(self, region: Region) -> Region:
        where = RegionAddresses(self.number, self.regions.names.index(region.name) + 1)
        ingress = where.ingress_https.removeprefix("https://")
        return replace(region, gateways=Gateways(ingress=ingress, mesh=where.mesh_gateway_peer))


PINNED = ("number", "regions", "acl")
"""What may not change while Consul data of the world is kept: addresses and ACL tokens live in it."""


def differences(old: WorldSpec, new: WorldSpec) -> dict[str, tuple[str, str]]:
    """Field name → (old, new) as text, for every field that differs."""
    before, after = _plain(old), _plain(new)
    return {key: (before[key], after[key]) for key in before if before[key] != after[key]}


def _plain(spec: WorldSpec) -> dict[str, str]:
    fields = spec_to_json(spec)
    fields["regions"] = ", ".join(spec.names)
    return {key: str(value) for key, value in fields.items()}


def spec_to_json(spec: WorldSpec) -> dict[str, Any]:
    """Plain JSON data; `spec_from_json` gives the same WorldSpec back."""
    body = {name: getattr(spec, name) for name in _SCALARS}
    body |= {"model": spec.model, "options": list(spec.options), "settings": list(spec.settings)}
    body["regions"] = [region_to_json(r) for r in spec.regions.regions]
    return body


def spec_from_json(body: Mapping[str, Any]) -> WorldSpec:
    """Raises SpecError when a field is missing or of the wrong kind."""
    try:
        regions = RegionSet(tuple(_region_from_json(r) for r in body["regions"]))
        # Not in the descriptions that the first release wrote.
        later = {"model": body.get("model", "")}
        later |= {name: tuple(body.get(name, ())) for name in ("options", "settings")}
        return WorldSpec(regions=regions, **{name: body[name] for name in _SCALARS}, **later)
    except (KeyError, TypeError, ValueError) as error:
        raise SpecError(f"not a description of a world: {error!r}") from error


_SCALARS = (
    "number",
    "instances",
    "canaries",
    "http",
    "acl",
    "engine",
    "token_cost_ms",
    "services_dir",
    "intentions_file",
    "tls_cert",
    "tls_key",
)


def region_to_json(region: Region) -> dict[str, Any]:
    """A region row as plain data, in the field names of the region files."""
    body = asdict(region)
    body["cloud"] = str(region.cloud)
    body["zones"], body["failover"] = list(region.zones), list(region.failover)
    return body


def _region_from_json(body: Mapping[str, Any]) -> Region:
    return Region(
        name=body["name"],
        cloud=Cloud(body["cloud"]),
        zones=tuple(body["zones"]),
        failover=tuple(body["failover"]),
        weight=body["weight"],
        gateways=Gateways(**body["gateways"]),
        primary=body["primary"],
        network=body["network"],
    )
