"""The processes of one region: argv, environment, what readiness means, who waits for whom.

Law: pure. The list is complete and in starting order; a supervisor only carries it out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from mesh.world.addresses import ADMIN, CONTROL_PLANE_HTTP, EXECUTOR, EXECUTOR_ADMIN, SIDECAR
from mesh.world.engines import ECHO, option_words
from mesh.world.layout import MARKER, RegionLayout
from mesh.world.spec import SERVICE, Instance, WorldSpec

CONSUL, CONTROL_PLANE, INGRESS, MESH_GATEWAY = "consul", "control-plane", "ingress", "mesh-gateway"
REGISTERED = "registered"
"""Not a process: the gateways stand in Consul (and, with ACLs, the tokens exist)."""

CONTROL_PLANE_ROLE, EXECUTOR_ROLE = "control-plane", f"instance-{SERVICE}"
"""Roles (mesh.consul.acl) whose Consul tokens the processes use when ACLs are on."""


class ProbeKind(StrEnum):
    """HTTP: 200 from `url`. CONSUL: the agent at `url` has a leader and Connect roots.
    SERVICE: the agent at `url` knows the service id `what`, registered with the ADS token of `digest`:
    after a crash it may still know one of the last run, whose token is no longer good."""

    HTTP = "http"
    CONSUL = "consul"
    SERVICE = "service"


@dataclass(frozen=True, slots=True)
class Probe:
    kind: ProbeKind
    url: str
    what: str = ""
    digest: str = ""


class Stop(StrEnum):
    """When a process is stopped, in this order: what takes requests first, what others lean on last."""

    EXECUTORS = "1-executors"
    ENVOYS = "2-envoys"
    CONTROL = "3-control"
    CONSUL = "4-consul"


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    """One process of a region.

    env: added to the supervisor's own environment. after: names (or REGISTERED) that must be ready first.
    grace_s: time between SIGTERM and SIGKILL when it is stopped.
    """

    name: str
    argv: tuple[str, ...]
    ready: Probe
    stop: Stop
    after: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    grace_s: float = 3.0


@dataclass(frozen=True, slots=True)
class Programs:
    """Absolute paths of the binaries; `weir` may be several words."""

    consul: str
    envoy: str
    weir: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ProxyPlan:
    """One Envoy. id: node id and Consul service id. process: name of its process."""

    id: str
    process: str
    host: str
    kind: str


def proxies(spec: WorldSpec, region: str) -> tuple[ProxyPlan, ...]:
    """All Envoys of a region."""
    where = spec.addresses(region)
    gateways = (
        ProxyPlan(f"{region}-ingress", INGRESS, where.ingress, "ingress"),
        ProxyPlan(f"{region}-mesh-gateway", MESH_GATEWAY, where.mesh_gateway, "mesh-gateway"),
    )
    sidecars = (ProxyPlan(m.sidecar_id, sidecar_name(m), m.address, "sidecar") for m in spec.members(region))
    return (*gateways, *sidecars)


def sidecar_name(member: Instance) -> str:
    """Process name of an instance's Envoy; the executor's is the instance id."""
    return f"{member.id}-sidecar"


def processes(
    spec: WorldSpec, paths: RegionLayout, programs: Programs, digests: Mapping[str, str]
) -> tuple[ProcessPlan, ...]:
    """Every process of `paths.name`, in starting order.

    digests: sha256 hex of the ADS token, by proxy id.
    """
    made = [_consul(spec, paths, programs), _control_plane(spec, paths, programs)]
    for proxy in proxies(spec, paths.name):
        if proxy.kind != "sidecar":
            made.append(_envoy(proxy, paths, programs, after=(REGISTERED, CONTROL_PLANE)))
    for member in spec.members(paths.name):
        made.append(_executor(spec, paths, programs, member, digests[member.sidecar_id]))
        proxy = ProxyPlan(member.sidecar_id, sidecar_name(member), member.address, "sidecar")
        made.append(_envoy(proxy, paths, programs, after=(CONTROL_PLANE, member.id)))
    return tuple(made)


def _env(paths: RegionLayout, name: str, token: str = "") -> dict[str, str]:
    marks = {MARKER: str(paths.world.folder), "WEIR_REGION": paths.name, "WEIR_PROCESS": name}
    return marks | ({"CONSUL_HTTP_TOKEN_FILE": token} if token else {})


def _role(spec: WorldSpec, paths: RegionLayout, role: str) -> str:
    return str(paths.world.tokens / role) if spec.acl else ""


def _consul(spec: WorldSpec, paths: RegionLayout, programs: Programs) -> ProcessPlan:
    return ProcessPlan(
        name=CONSUL,
        argv=(programs.consul, "agent", "-config-file", str(paths.consul_config)),
        env=_env(paths, CONSUL),
        ready=Probe(ProbeKind.CONSUL, spec.addresses(paths.name).consul_http),
        stop=Stop.CONSUL,
        grace_s=5.0,
    )


def _control_plane(spec: WorldSpec, paths: RegionLayout, programs: Programs) -> ProcessPlan:
    where = spec.addresses(paths.name)
    return ProcessPlan(
        name=CONTROL_PLANE,
        argv=(
            *programs.weir,
            "control-plane",
            *("--region", paths.name),
            *("--consul", where.consul_http),
            *("--regions-dir", str(paths.world.rows)),
            *("--services-dir", spec.services_dir),
            *("--ads-socket", str(paths.ads_socket)),
            *("--http", f"{where.control_plane}:{CONTROL_PLANE_HTTP}"),
            *("--source-address", where.control_plane),
        ),
        env=_env(paths, CONTROL_PLANE, _role(spec, paths, CONTROL_PLANE_ROLE)),
        ready=Probe(ProbeKind.HTTP, f"{where.control_plane_http}/healthz"),
        stop=Stop.CONTROL,
        after=(REGISTERED,),
    )


def _executor(
    spec: WorldSpec, paths: RegionLayout, programs: Programs, member: Instance, digest: str
) -> ProcessPlan:
    where = spec.addresses(paths.name)
    return ProcessPlan(
        name=member.id,
        argv=(
            *programs.weir,
            "executor",
            *("--service", SERVICE),
            *("--stage", member.stage),
            *("--region", paths.name),
            *("--zone", member.zone),
            *("--version", member.version),
            *("--model", member.model),
            *("--instance", member.id),
            *("--listen", f"{member.address}:{EXECUTOR}"),
            *("--sidecar", f"{member.address}:{SIDECAR}"),
            *("--admin", f"{member.address}:{EXECUTOR_ADMIN}"),
            *("--run-dir", str(paths.run)),
            *("--consul", where.consul_http),
            *("--xds-token-sha256", digest),
            *_engine(spec),
        ),
        env=_env(paths, member.id, _role(spec, paths, EXECUTOR_ROLE)),
        ready=Probe(ProbeKind.SERVICE, where.consul_http, member.sidecar_id, digest),
        stop=Stop.EXECUTORS,
        # With ACLs there is no token to start with before the first leader has made it.
        after=(REGISTERED,) if spec.acl else (),
        grace_s=15.0,
    )


def _engine(spec: WorldSpec) -> tuple[str, ...]:
    price = ("--token-cost-ms", f"{spec.token_cost_ms:g}") if spec.engine == ECHO else ()
    return ("--engine", spec.engine, *price, *option_words(spec.engine, spec.options, spec.settings))


def _envoy(
    proxy: ProxyPlan, paths: RegionLayout, programs: Programs, *, after: tuple[str, ...]
) -> ProcessPlan:
    return ProcessPlan(
        name=proxy.process,
        argv=(
            programs.envoy,
            *("--config-path", str(paths.bootstrap(proxy.process))),
            *("--concurrency", "1"),
            # Hot restart leaves shared memory in /dev/shm after a SIGKILL, and nothing here uses it.
            "--disable-hot-restart",
            *("--log-level", "warning"),
            # A listener chain that changes drains for this long; token streams on it may well last minutes.
            *("--drain-time-s", "600"),
            *("--drain-strategy", "immediate"),
        ),
        env=_env(paths, proxy.process),
        ready=Probe(ProbeKind.HTTP, f"http://{proxy.host}:{ADMIN}/ready"),
        stop=Stop.ENVOYS,
        after=after,
    )
