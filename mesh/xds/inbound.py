"""RDS of a sidecar: the application behind it, and who may call it.

Law: pure. Intentions stand in routes, not in the listener: a changed route holds for the next request of
every connection, while a changed listener leaves open connections under the old rules until they are drained.
"""

from __future__ import annotations

from functools import lru_cache

from envoy.config.route.v3 import route_pb2

from intentions.model import Intention
from mesh.model import Proxy, ServiceSpec
from mesh.xds import names, rbac
from mesh.xds.clusters import LOCAL_APP
from mesh.xds.pb import Json, proto, seconds, typed
from mesh.xds.resource_set import Resource, make

ROUTE_CONFIG = "inbound"
RBAC_FILTER = "envoy.filters.http.rbac"

_SLACK_S = 5.0
"""The ingress' idle timeout must fire first: its answer names the reason, ours would look like a reset."""


def colour(region: str, stage: str) -> str:
    """Value of `x-envoy-upstream-metadata`."""
    return f"region={region};stage={stage}"


@lru_cache(maxsize=1024)
def route_config(
    spec: ServiceSpec, value: str, intentions: tuple[Intention, ...], trust_domain: str
) -> Resource:
    """Everything to the local application. value: the colour of this instance, set on request and response.

    The sidecar says it, not the ingress: it knows who it is, also when a mesh gateway or a failover chose it.
    """
    header = [
        {
            "header": {"key": names.METADATA_HEADER, "value": value},
            "append_action": "OVERWRITE_IF_EXISTS_OR_ADD",
        }
    ]
    action = {
        "cluster": LOCAL_APP,
        "timeout": seconds(0),
        "idle_timeout": seconds(spec.idle_timeout_s + _SLACK_S),
    }
    routes = [
        _route("health", {"path": spec.health_path}, action, rbac.mesh_members(trust_domain)),
        _route("app", {"prefix": "/"}, action, rbac.rules(intentions, spec.name, trust_domain)),
    ]
    return make(
        ROUTE_CONFIG,
        proto(
            route_pb2.RouteConfiguration,
            {
                "name": ROUTE_CONFIG,
                "request_headers_to_add": header,
                "response_headers_to_add": header,
                "virtual_hosts": [{"name": "app", "domains": ["*"], "routes": routes}],
            },
        ),
    )


def value_of(region: str, proxy: Proxy) -> str:
    return colour(region, proxy.stage)


def _route(name: str, match: Json, action: Json, rules: Json) -> Json:
    per_route = typed("envoy.extensions.filters.http.rbac.v3.RBACPerRoute", {"rbac": {"rules": rules}})
    return {
        "name": name,
        "match": match,
        "route": action,
        "typed_per_filter_config": {RBAC_FILTER: per_route},
    }
