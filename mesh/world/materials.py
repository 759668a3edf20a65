"""What a region needs on disk before its processes start: Consul configuration, proxy tokens, bootstraps.

Law: makes files from the plan and fresh secrets; starts nothing. Everything is written again at each
start of a region, so that half-written or stale files of a crash can't matter.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

from mesh.world import files
from mesh.world.consul_config import ConsulSecrets, Version, consul_config
from mesh.world.envoys import bootstrap_of
from mesh.world.layout import RegionLayout
from mesh.world.plan import ProxyPlan, proxies
from mesh.world.spec import WorldSpec


@dataclass(frozen=True, slots=True)
class Tokens:
    """ADS secrets by proxy id; they live as long as the region runs."""

    by_proxy: Mapping[str, str] = field(repr=False)

    @property
    def digests(self) -> dict[str, str]:
        """sha256 hex by proxy id: what may be shown to Consul."""
        return {name: hashlib.sha256(t.encode()).hexdigest() for name, t in self.by_proxy.items()}


def new_tokens(spec: WorldSpec, region: str) -> Tokens:
    return Tokens({proxy.id: secrets.token_urlsafe(32) for proxy in proxies(spec, region)})


def write(
    spec: WorldSpec, paths: RegionLayout, tokens: Tokens, keys: ConsulSecrets, version: Version
) -> None:
    """Write everything. Files with secrets are 0600."""
    config = consul_config(spec, paths.name, str(paths.consul_data), keys, version)
    files.write_json(paths.consul_config, config, mode=0o600)
    for proxy in proxies(spec, paths.name):
        _write_bootstrap(spec, paths, proxy, tokens.by_proxy[proxy.id])


def _write_bootstrap(spec: WorldSpec, paths: RegionLayout, proxy: ProxyPlan, token: str) -> None:
    body = bootstrap_of(spec, paths, proxy, token)
    files.write(paths.bootstrap(proxy.process), json.dumps(body, indent=1), mode=0o600)
