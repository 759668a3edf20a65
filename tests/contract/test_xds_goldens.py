"""What each kind of proxy is given, as goldens, and each golden through `envoy --mode validate`.

Secrets are left out of the goldens. For validation all is rendered static, certificates too: Envoy checks
routes against clusters, filters against their settings, TLS contexts.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from intentions.model import Action, Intention
from mesh import tools
from mesh.model import CANARY, FULL, STABLE, Health, MeshSnapshot, Proxy, ProxyKind
from mesh.xds import names
from mesh.xds.bootstrap import ProxyIdentity, bootstrap
from mesh.xds.pb import to_json
from mesh.xds.resource_set import ResourceSet
from mesh.xds.resources import build
from tests import xds_samples as samples
from tests.throwaway_ca import ThrowawayCa
from tests.xds_samples import CN, EU, US

CA = ThrowawayCa()
BASE = samples.snapshot()


def _stage_without(stage: str, region: str) -> MeshSnapshot:
    ends = tuple(e for e in BASE.endpoints if (e.region, e.stage) != (region, stage))
    return replace(BASE, endpoints=ends)


def _evacuated() -> MeshSnapshot:
    draining = tuple(replace(e, health=Health.DRAINING) if e.region == CN else e for e in BASE.endpoints)
    moved = samples.plan((US, CANARY, 750), (US, STABLE, 4250), (EU, CANARY, 750), (EU, STABLE, 4250))
    return replace(BASE, endpoints=draining, plans={"chat": moved})


def _no_instance() -> MeshSnapshot:
    return replace(BASE, endpoints=(), gateways=(), plans={}, intentions=())


def _wildcards() -> MeshSnapshot:
    rules = (
        Intention("chat", "*", Action.ALLOW),
        Intention("chat", "batch", Action.DENY),
        Intention("*", "web", Action.DENY),
    )
    return replace(BASE, intentions=rules)


INGRESS, SIDECAR, GATEWAY = samples.ingress(), samples.sidecar(), samples.mesh_gateway()

CASES: Mapping[str, tuple[MeshSnapshot, Proxy]] = {
    "ingress-canary-15": (BASE, INGRESS),
    "ingress-evacuated": (_evacuated(), INGRESS),
    "ingress-canary-empty": (
        replace(_stage_without(CANARY, CN), plans={"chat": samples.plan((CN, STABLE, FULL))}),
        INGRESS,
    ),
    "ingress-flat-network": (replace(BASE, regions=samples.regions("flat")), INGRESS),
    "ingress-no-instance": (_no_instance(), INGRESS),
    "sidecar": (BASE, SIDECAR),
    "sidecar-wildcards": (_wildcards(), SIDECAR),
    "sidecar-no-intentions": (_no_instance(), SIDECAR),
    "mesh-gateway": (BASE, GATEWAY),
    "mesh-gateway-no-instance": (_no_instance(), GATEWAY),
}


def rendered(snap: MeshSnapshot, proxy: Proxy) -> ResourceSet:
    leafs = (CA.leaf(s, snap.region) for s in ("ingress-gateway", "mesh-gateway", "chat"))
    return build(samples.with_leafs(snap, *leafs), proxy)


def readable(resources: ResourceSet) -> dict[str, dict[str, Any]]:
    """JSON by short type and name, without secrets."""
    return {
        type_url.rsplit(".", 1)[-1]: {name: to_json(r.message()) for name, r in group.items()}
        for type_url, group in resources.by_type.items()
        if type_url != names.SECRET
    }


def bootstrap_of(kind: ProxyKind, metrics: bool) -> dict[str, Any]:
    who = ProxyIdentity("proxy-1", kind, "chat", CN, "a-token", zone="a", stage=STABLE)
    return bootstrap(
        who,
        ads_socket="/run/weir/cn-north-1.sock",
        admin=("127.103.1.3", 19000),
        source_address="127.103.1.3",
        metrics=("127.103.1.3", 9102) if metrics else None,
    )


def static(resources: ResourceSet) -> dict[str, Any]:
    """A bootstrap that holds the whole set, with EDS and RDS written into their users."""
    data = readable(resources)
    config = bootstrap_of(ProxyKind.INGRESS, metrics=False)
    config["admin"] = {"address": {"socket_address": {"address": "127.0.0.1", "port_value": 0}}}
    data = _with_certificates(data)
    for cluster in data["Cluster"].values():
        if cluster.pop("eds_cluster_config", None):
            cluster["type"] = "STATIC"
            cluster["load_assignment"] = data["ClusterLoadAssignment"][cluster["name"]]
    for listener in data["Listener"].values():
        _inline_routes(listener, data.get("RouteConfiguration", {}))
    config["static_resources"]["clusters"] += data["Cluster"].values()
    config["static_resources"]["listeners"] = list(data["Listener"].values())
    return config


def _with_certificates(node: Any) -> Any:
    """SDS replaced: Envoy 1.40 crashes when it validates `transport_socket_matches` that use SDS."""
    if isinstance(node, list):
        return [_with_certificates(item) for item in node]
    if not isinstance(node, dict):
        return node
    node = {key: _with_certificates(value) for key, value in node.items()}
    if node.pop("tls_certificate_sds_secret_configs", None):
        leaf = CA.leaf("chat", CN)
        pair = {"certificate_chain": leaf.cert_pem, "private_key": leaf.key_pem}
        node["tls_certificates"] = [{key: {"inline_string": pem} for key, pem in pair.items()}]
    both = node.pop("combined_validation_context", None)
    if both:
        node["validation_context"] = {
            **both["default_validation_context"],
            "trusted_ca": {"inline_string": CA.pem},
        }
    return node


def _inline_routes(listener: dict[str, Any], tables: Mapping[str, Any]) -> None:
    for chain in listener["filter_chains"]:
        for network in chain["filters"]:
            rds = network["typed_config"].pop("rds", None)
            if rds:
                network["typed_config"]["route_config"] = {
                    **tables[rds["route_config_name"]],
                    "validate_clusters": True,
                }


def validate(config: dict[str, Any], folder: Path) -> None:
    path = folder / "envoy.json"
    path.write_text(json.dumps(config))
    command = [str(tools.find("envoy")), "--mode", "validate", "-c", str(path), "--log-level", "warning"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    # A field that Envoy calls deprecated works today and not after the next upgrade.
    warned = [
        line for line in done.stderr.splitlines() if "Deprecated field" in line and STATS_PREFIX not in line
    ]
    assert not warned, warned[0]


STATS_PREFIX = "access_loggers.stats.v3.Config.stat_prefix"
"""Its successor `stats_scope` is unknown to Envoy 1.36 to 1.38 and to xds-protos 1.85."""


@pytest.mark.parametrize("case", CASES)
def test_golden(case: str, golden_json) -> None:
    golden_json(f"xds/{case}.json", readable(rendered(*CASES[case])))


@pytest.mark.parametrize("kind", list(ProxyKind))
def test_bootstrap_golden(kind: ProxyKind, golden_json) -> None:
    golden_json(f"xds/bootstrap-{kind.value}.json", bootstrap_of(kind, metrics=kind is ProxyKind.INGRESS))


@pytest.mark.real
@pytest.mark.parametrize("case", CASES)
def test_envoy_accepts(case: str, tmp_path: Path) -> None:
    validate(static(rendered(*CASES[case])), tmp_path)


@pytest.mark.real
@pytest.mark.parametrize("kind", list(ProxyKind))
def test_envoy_accepts_the_bootstrap(kind: ProxyKind, tmp_path: Path) -> None:
    validate(bootstrap_of(kind, metrics=True), tmp_path)


@pytest.mark.real
def test_validation_would_notice(tmp_path: Path) -> None:
    """The yardstick itself: a route to a cluster that is not there must fail."""
    config = static(rendered(*CASES["ingress-canary-15"]))
    config["static_resources"]["clusters"] = config["static_resources"]["clusters"][:1]
    with pytest.raises(AssertionError, match="unknown weighted cluster"):
        validate(config, tmp_path)
