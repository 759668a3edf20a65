"""The configuration of one region's Consul agent, as plain data.

Law: pure. One server per region, its own datacenter, federated with the others over the WAN gossip pool.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mesh.world.addresses import CONSUL_HTTP, CONSUL_LAN, CONSUL_RPC, CONSUL_WAN
from mesh.world.spec import WorldSpec

Version = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class ConsulSecrets:
    """Secrets of a world. gossip: base64 of 32 bytes. management, roles: secret ids (UUIDs) of ACL tokens.

    Both are empty in a world without ACLs.
    """

    gossip: str = field(repr=False)
    management: str = field(default="", repr=False)
    roles: Mapping[str, str] = field(default_factory=dict, repr=False)


def consul_config(
    spec: WorldSpec, region: str, data_dir: str, secrets: ConsulSecrets, version: Version
) -> dict[str, Any]:
    """The agent's configuration file.

    Stopping is a crash on purpose (`leave_on_terminate` off): a server that leaves takes itself out of
    its raft peers and out of the other regions' WAN pool, and coming back then takes seconds longer.
    """
    host = spec.addresses(region).consul
    others = [spec.addresses(name).consul for name in spec.names if name != region]
    body: dict[str, Any] = {
        "server": True,
        "bootstrap_expect": 1,
        "datacenter": region,
        "primary_datacenter": spec.primary,
        "node_name": f"{region}-server",
        "bind_addr": host,
        "client_addr": host,
        "advertise_addr": host,
        "advertise_addr_wan": host,
        "ports": {
            "http": CONSUL_HTTP,
            "server": CONSUL_RPC,
            "serf_lan": CONSUL_LAN,
            "serf_wan": CONSUL_WAN,
            "dns": -1,
            "grpc": -1,
            "https": -1,
        },
        "connect": {"enabled": True},
        "performance": {"raft_multiplier": 1},
        "encrypt": secrets.gossip,
        "retry_join_wan": others,
        "retry_interval_wan": "1s",
        # The defaults (probe 5 s, timeout 3 s) are for oceans; here a dead region is known within seconds.
        "gossip_wan": {"probe_interval": "1s", "probe_timeout": "500ms", "suspicion_mult": 4},
        "leave_on_terminate": False,
        "skip_leave_on_interrupt": True,
        "disable_update_check": True,
        "log_level": "INFO",
        "data_dir": data_dir,
        **({"ui_config": {"enabled": True}} if version >= (1, 9, 0) else {"ui": True}),
    }
    if spec.acl:
        body["acl"] = _acl(secrets, version, primary=region == spec.primary)
    return body


def _acl(secrets: ConsulSecrets, version: Version, *, primary: bool) -> dict[str, Any]:
    first = "initial_management" if version >= (1, 11, 0) else "master"
    tokens = {"agent": secrets.roles["agent"]}
    if primary:
        tokens[first] = secrets.management
    else:
        tokens["replication"] = secrets.roles["replication"]
    return {
        "enabled": True,
        "default_policy": "deny",
        # The primary may be gone: what was once read of a token stays good.
        "down_policy": "extend-cache",
        "enable_token_replication": True,
        "tokens": tokens,
    }
