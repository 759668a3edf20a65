"""The address plan of a local world: which part of which region listens where.

Law: pure arithmetic over docs/architecture.md ("One region on this machine"). No socket is opened here.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST_WORLD, LAST_WORLD = 20, 250
MAX_REGIONS = 250
MAX_INSTANCES = 240

CONSUL_HTTP, CONSUL_RPC, CONSUL_LAN, CONSUL_WAN = 8500, 8300, 8301, 8302
CONTROL_PLANE_HTTP = 9102
INGRESS_HTTPS, INGRESS_HTTP, INGRESS_METRICS = 8443, 8080, 9102
MESH_GATEWAY = 8443
ADMIN = 19000
EXECUTOR, EXECUTOR_ADMIN, SIDECAR = 9000, 9001, 21000

_CONSUL, _CONTROL_PLANE, _INGRESS, _MESH_GATEWAY, _FIRST_INSTANCE = 1, 2, 3, 4, 10


@dataclass(frozen=True, slots=True, order=True)
class Listener:
    """One TCP listener a region needs. `what` says to a person which part wants it."""

    host: str
    port: int
    what: str

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class RegionAddresses:
    """Loopback addresses of one region: `127.<world>.<index>.<part>`.

    world: FIRST_WORLD..LAST_WORLD. index: 1-based place of the region in the world, sorted by name.
    Raises ValueError outside these bounds.
    """

    world: int
    index: int

    def __post_init__(self) -> None:
        if not FIRST_WORLD <= self.world <= LAST_WORLD:
            raise ValueError(f"world number {self.world} is outside {FIRST_WORLD}..{LAST_WORLD}")
        if not 1 <= self.index <= MAX_REGIONS:
            raise ValueError(f"region index {self.index} is outside 1..{MAX_REGIONS}")

    def _host(self, part: int) -> str:
        return f"127.{self.world}.{self.index}.{part}"

    @property
    def consul(self) -> str:
        """Host of the Consul agent."""
        return self._host(_CONSUL)

    @property
    def control_plane(self) -> str:
        return self._host(_CONTROL_PLANE)

    @property
    def ingress(self) -> str:
        return self._host(_INGRESS)

    @property
    def mesh_gateway(self) -> str:
        return self._host(_MESH_GATEWAY)

    def instance(self, number: int) -> str:
        """Host of instance `number` (0-based) and of its sidecar."""
        if not 0 <= number < MAX_INSTANCES:
            raise ValueError(f"instance {number} is outside 0..{MAX_INSTANCES - 1}")
        return self._host(_FIRST_INSTANCE + number)

    @property
    def consul_http(self) -> str:
        """Base URL of the Consul HTTP API and UI."""
        return f"http://{self.consul}:{CONSUL_HTTP}"

    @property
    def ingress_https(self) -> str:
        return f"https://{self.ingress}:{INGRESS_HTTPS}"

    @property
    def ingress_http(self) -> str:
        """Only answered when the world was made with `--http`."""
        return f"http://{self.ingress}:{INGRESS_HTTP}"

    @property
    def ingress_admin(self) -> str:
        return f"http://{self.ingress}:{ADMIN}"

    @property
    def ingress_metrics(self) -> str:
        return f"http://{self.ingress}:{INGRESS_METRICS}/metrics"

    @property
    def control_plane_http(self) -> str:
        return f"http://{self.control_plane}:{CONTROL_PLANE_HTTP}"

    @property
    def mesh_gateway_peer(self) -> str:
        """`host:port` by which other regions enter."""
        return f"{self.mesh_gateway}:{MESH_GATEWAY}"

    def listeners(self, instances: int, *, http: bool) -> tuple[Listener, ...]:
        """Every TCP listener this region needs with `instances` instances in all."""
        found = [
            Listener(self.consul, CONSUL_HTTP, "Consul HTTP"),
            Listener(self.consul, CONSUL_RPC, "Consul RPC"),
            Listener(self.consul, CONSUL_LAN, "Consul LAN gossip"),
            Listener(self.consul, CONSUL_WAN, "Consul WAN gossip"),
            Listener(self.control_plane, CONTROL_PLANE_HTTP, "control plane"),
            Listener(self.ingress, INGRESS_HTTPS, "ingress HTTPS"),
            Listener(self.ingress, ADMIN, "ingress admin"),
            Listener(self.ingress, INGRESS_METRICS, "ingress metrics"),
            Listener(self.mesh_gateway, MESH_GATEWAY, "mesh gateway"),
            Listener(self.mesh_gateway, ADMIN, "mesh gateway admin"),
        ]
        if http:
            found.append(Listener(self.ingress, INGRESS_HTTP, "ingress HTTP"))
        for number in range(instances):
            host = self.instance(number)
            found += [
                Listener(host, EXECUTOR, f"executor {number}"),
                Listener(host, EXECUTOR_ADMIN, f"executor {number} admin"),
                Listener(host, SIDECAR, f"sidecar {number}"),
                Listener(host, ADMIN, f"sidecar {number} admin"),
            ]
        return tuple(found)
