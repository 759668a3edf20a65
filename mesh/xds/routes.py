"""RDS of the ingress: which share of whose requests goes where. The only resource a weight change touches.

Law: pure. Weights are basis points in the order of the plan's slices, because that order is what keeps a
session's colour while a share grows. No total timeout anywhere: token streams are long; what is bounded is
silence.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

from envoy.config.route.v3 import route_components_pb2, route_pb2

from mesh.model import CANARY, STABLE, ServiceSpec, Slice
from mesh.xds import names
from mesh.xds.pb import Json, proto, seconds, typed
from mesh.xds.resource_set import Reference, Resource, make

STAGES = (STABLE, CANARY)

QUEUE_FULL = 429
HOST_SELECTION_ATTEMPTS = 8
"""How often a retry asks the balancer again for a host that it has not tried yet."""

Shares = tuple[Slice, ...]

_INVENTED = ("x-envoy-upstream-metadata", "x-envoy-attempt-count", "x-forwarded-client-cert")
"""Headers that only the mesh may set. (`use_remote_address` takes away Envoy's control headers.)"""


def limiter(service: str) -> str:
    """Name of the rate limit filter of a service in the ingress listeners; routes switch it on."""
    return f"weir.rate_limit.{service}"


@lru_cache(maxsize=256)
def dyed(slices: Shares, stage: str, live: frozenset[str]) -> Shares:
    """Where a tester who asks for `stage` goes: the plan's own slices of it, else the regions that have it.

    live: regions with a healthy instance of the stage. A canary at weight 0 can so be tried before it gets
    traffic, in regions chosen like everybody's. Empty when nobody has the stage: then the normal route
    answers, and its header tells the truth.
    """
    own = tuple(s for s in slices if s.stage == stage)
    if own:
        return own
    weights: dict[str, int] = {}
    for piece in slices:
        if piece.region in live:
            weights[piece.region] = weights.get(piece.region, 0) + piece.weight
    return tuple(Slice(region, stage, weight) for region, weight in weights.items())


@lru_cache(maxsize=64)
def route_config(
    services: tuple[tuple[ServiceSpec, Shares, tuple[tuple[str, Shares], ...]], ...],
) -> Resource:
    """The ingress route table. Per service: spec, slices of its plan, (stage, slices) for dyed requests."""
    everyone = route_components_pb2.VirtualHost(name="paths", domains=["*"])
    config = route_pb2.RouteConfiguration(name=names.ROUTE_CONFIG, request_headers_to_remove=_INVENTED)
    config.ignore_port_in_host_matching = True
    for spec, slices, dyes in services:
        by_path, by_host = _service_routes(spec, slices, dyes)
        everyone.routes.extend(by_path)
        host = route_components_pb2.VirtualHost(name=spec.name, domains=[f"{spec.name}.*"])
        host.include_attempt_count_in_response = True
        host.routes.extend(by_host)
        config.virtual_hosts.append(host)
    everyone.include_attempt_count_in_response = True
    everyone.routes.append(_nothing_here())
    config.virtual_hosts.append(everyone)
    return make(names.ROUTE_CONFIG, config, _clusters(services))


def _clusters(
    services: tuple[tuple[ServiceSpec, Shares, tuple[tuple[str, Shares], ...]], ...],
) -> frozenset[Reference]:
    """Every cluster that the table names. Told here so that a weight change needn't walk the message."""
    return frozenset(
        (names.CLUSTER, names.cluster(spec.name, piece.region, piece.stage))
        for spec, slices, dyes in services
        for shares in (slices, *(shares for _, shares in dyes if spec.dye_header and slices))
        for piece in shares
    )


@lru_cache(maxsize=1024)
def _service_routes(
    spec: ServiceSpec, slices: Shares, dyes: tuple[tuple[str, Shares], ...]
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Routes of a service by path (prefix taken off) and by host (path as it is), dyed ones first."""
    prefix = "/" + spec.prefix.strip("/")
    by_path: list[tuple[str, Json, Json]] = [("root", {"prefix": "/"}, {})]
    if prefix != "/":
        by_path = [
            ("prefix", {"prefix": prefix + "/"}, {"prefix_rewrite": "/"}),
            ("exact", {"path": prefix}, {"prefix_rewrite": "/"}),
        ]
    by_host: list[tuple[str, Json, Json]] = [("host", {"prefix": "/"}, {})]
    build: Callable[[list[tuple[str, Json, Json]]], tuple[Any, ...]] = lambda ways: tuple(  # noqa: E731
        proto(route_components_pb2.Route, route)
        for how, match, rewrite in ways
        for route in _variants(spec, (how, match, rewrite), slices, dyes)
    )
    return build(by_path), build(by_host)


def _variants(
    spec: ServiceSpec, way: tuple[str, Json, Json], slices: Shares, dyes: tuple[tuple[str, Shares], ...]
) -> list[Json]:
    how, match, rewrite = way
    if not slices:
        text = f"service {spec.name} has no instance that takes traffic in any region"
        return [_answer(f"{spec.name}-{how}-empty", match, 503, text, spec.name)]
    routes = []
    for stage, shares in dyes:
        if spec.dye_header and shares:
            wanted = {"name": names.DYE_HEADER, "string_match": {"exact": stage}}
            dyed_match = {**match, "headers": [wanted]}
            routes.append(
                _forward(spec, f"{spec.name}-{how}-{stage}", dyed_match, {**_action(spec, shares), **rewrite})
            )
    routes.append(_forward(spec, f"{spec.name}-{how}", match, {**_action(spec, slices), **rewrite}))
    return routes


def _forward(spec: ServiceSpec, name: str, match: Json, action: Json) -> Json:
    enabled = typed("envoy.config.route.v3.FilterConfig", {"config": {}})
    return {
        "name": name,
        "match": match,
        "route": action,
        "metadata": {"filter_metadata": {names.METADATA_NAMESPACE: {"service": spec.name}}},
        "typed_per_filter_config": {limiter(spec.name): enabled},
    }


def _action(spec: ServiceSpec, shares: Shares) -> Json:
    return {
        "weighted_clusters": {
            "clusters": [
                {"name": names.cluster(spec.name, s.region, s.stage), "weight": s.weight} for s in shares
            ],
            "use_hash_policy": True,
        },
        "hash_policy": [
            {"header": {"header_name": names.SESSION_HEADER}, "terminal": True},
            {"cookie": {"name": names.SESSION_COOKIE}, "terminal": True},
        ],
        "timeout": seconds(0),
        "idle_timeout": seconds(spec.idle_timeout_s),
        "retry_policy": _retries(spec),
    }


def _retries(spec: ServiceSpec) -> Json:
    """Retries while nothing has been sent on to the client; never after.

    `per_try_timeout` is the first-byte timeout: Envoy ignores it once the response has begun, unlike
    `per_try_idle_timeout`, which would also cut a stream that pauses between tokens.

    429 is an instance whose queue is full: no failure, and another one may have room. The retry budget keeps
    this from making an overload of all of them worse.
    """
    base = max(1, spec.retry.base_interval_ms) / 1000
    return {
        "retry_on": "connect-failure,refused-stream,reset,gateway-error,retriable-status-codes",
        "retriable_status_codes": [QUEUE_FULL],
        "num_retries": spec.retry.attempts,
        "per_try_timeout": seconds(spec.first_byte_timeout_s),
        "retry_back_off": {"base_interval": seconds(base), "max_interval": seconds(base * 10)},
        "retry_host_predicate": [
            {
                "name": "envoy.retry_host_predicates.previous_hosts",
                "typed_config": typed("envoy.extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate"),
            }
        ],
        "host_selection_retry_max_attempts": HOST_SELECTION_ATTEMPTS,
    }


def _answer(name: str, match: Json, status: int, text: str, service: str) -> Json:
    """A direct response; the listener's local reply format makes JSON of the text."""
    return {
        "name": name,
        "match": match,
        "direct_response": {"status": status, "body": {"inline_string": text}},
        "metadata": {"filter_metadata": {names.METADATA_NAMESPACE: {"service": service}}},
    }


@cache
def _nothing_here() -> Any:
    text = "no service has this path; services are reached as /<service>/… or by host <service>.<anything>"
    return proto(route_components_pb2.Route, _answer("nothing-here", {"prefix": "/"}, 404, text, "-"))
