"""Bodies of service registrations, exactly as docs/architecture.md has them.

Law: pure. The secret that a proxy shows to the control plane never enters Consul, only its sha256.

Checks start as `passing`: whoever registers is already listening, and an agent that restarts begins all
its checks anew: were they to start as critical (Consul's default) a restart would take the whole region out.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from mesh.model import ProxyKind

READY, DRAINING, ASLEEP, WAKING = "ready", "draining", "asleep", "waking"
STARTING, COLD, QUARANTINED = "starting", "cold", "quarantined"
"""Values of the meta key `lifecycle`; only READY takes traffic (mesh.consul.decode)."""
SIDECAR_PORT = 21000
FORGET_AFTER = "1h"
FAILURES_BEFORE_CRITICAL = 2
"""A single lost check is no death; Envoy's own outlier detection is faster for the dead."""


@dataclass(frozen=True, slots=True)
class Instance:
    """One instance of a service and its sidecar. Addresses are IP literals, ports TCP.

    device: which it runs on, a name that is unique on its host ("cpu", the UUID of a GPU or MIG slice). host:
    which machine that is, by a name that all its containers have in common.
    admin: host:port of its admin verbs. slept_at: unix seconds when it fell asleep, 0: it does not sleep.
    """

    service: str
    id: str
    region: str
    zone: str
    stage: str
    version: str
    model: str
    tenant_class: str
    address: str
    port: int
    xds_token_sha256: str
    sidecar_address: str = ""
    sidecar_port: int = SIDECAR_PORT
    lifecycle: str = READY
    health_path: str = "/health"
    device: str = ""
    admin: str = ""
    slept_at: int = 0
    host: str = ""


_META = ("region", "zone", "stage", "version", "model", "tenant_class", "lifecycle")
_POOL_META = ("device", "host", "admin", "slept_at")
"""For who reads the pool from Consul; left out where there is nothing to say."""


def sidecar_id(instance_id: str) -> str:
    """Consul's own rule; the id can't be chosen."""
    return f"{instance_id}-sidecar-proxy"


def instance(it: Instance) -> dict[str, Any]:
    """Body for `Consul.register`: the instance with its HTTP check, its sidecar with an alias check."""
    facts = asdict(it)
    meta = {name: facts[name] for name in _META} | {n: str(facts[n]) for n in _POOL_META if facts[n]}
    return {
        "ID": it.id,
        "Name": it.service,
        "Address": it.address,
        "Port": it.port,
        "Meta": meta,
        "Checks": [
            _check(f"{it.id}:http", "executor answers", HTTP=f"http://{it.address}:{it.port}{it.health_path}")
        ],
        "Connect": {"SidecarService": _sidecar(it, meta)},
    }


def ingress(region: str, address: str, port: int, xds_token_sha256: str) -> dict[str, Any]:
    """An ordinary service, so that Consul asks for no ingress-gateway config entry."""
    return _gateway(f"{region}-ingress", ProxyKind.INGRESS, (address, port), region, xds_token_sha256) | {
        "Name": "ingress-gateway"
    }


def mesh_gateway(region: str, address: str, port: int, xds_token_sha256: str) -> dict[str, Any]:
    it = _gateway(f"{region}-mesh-gateway", ProxyKind.MESH_GATEWAY, (address, port), region, xds_token_sha256)
    return it | {"Name": "mesh-gateway", "Kind": "mesh-gateway"}


def _gateway(
    id: str, kind: ProxyKind, where: tuple[str, int], region: str, xds_token_sha256: str
) -> dict[str, Any]:
    address, port = where
    return {
        "ID": id,
        "Address": address,
        "Port": port,
        "Meta": {"region": region, "weir_kind": kind.value, "xds_token_sha256": xds_token_sha256},
        "Checks": [_check(f"{id}:tcp", "gateway accepts", TCP=f"{address}:{port}")],
    }


def _sidecar(it: Instance, meta: dict[str, str]) -> dict[str, Any]:
    return {
        "Address": it.sidecar_address or it.address,
        "Port": it.sidecar_port,
        "Meta": meta | {"xds_token_sha256": it.xds_token_sha256, "weir_kind": ProxyKind.SIDECAR.value},
        "Proxy": {"LocalServiceAddress": it.address, "LocalServicePort": it.port},
        # Consul's default adds a TCP check every 10 s, far too slow to mean anything here.
        "Checks": [
            {
                "CheckID": f"{it.id}:alias",
                "Name": "alias of the instance",
                "AliasService": it.id,
                "Status": "passing",
            }
        ],
    }


def _check(check_id: str, name: str, **probe: str) -> dict[str, Any]:
    return {
        "CheckID": check_id,
        "Name": name,
        "Interval": "1s",
        "Timeout": "1s",
        "Status": "passing",
        "FailuresBeforeCritical": FAILURES_BEFORE_CRITICAL,
        "DeregisterCriticalServiceAfter": FORGET_AFTER,
    } | probe
