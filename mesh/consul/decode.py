"""Consul's JSON becomes frozen values of mesh.model.

Law: pure. A list is decoded entry by entry: one that makes no sense is left out and told as a problem
(the second value), so that one bad registration can't blind the mesh. A single value that makes no
sense (leaf, roots) raises DecodeError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from intentions.model import Action, Intention
from mesh.model import STABLE, Endpoint, Gateway, Health, Leaf, Proxy, ProxyKind, Roots

T = TypeVar("T")
Problems = tuple[str, ...]

SIDECAR_SUFFIX = "-sidecar-proxy"
RESTING = frozenset({"draining", "asleep", "waking", "starting", "cold", "quarantined"})
"""Lifecycles that take no new request."""
_MAINTENANCE = ("_node_maintenance", "_service_maintenance:")
_WORST = (Health.CRITICAL, Health.WARNING)


class DecodeError(ValueError):
    """An answer of Consul that is not what its API promises."""


def endpoints(body: Any, service: str, region: str) -> tuple[tuple[Endpoint, ...], Problems]:
    """`/v1/health/connect/<service>?dc=<region>` -> endpoints, sorted.

    region: whose catalog was asked. It wins over the instance's own meta: where a thing is, is a matter of
    which datacenter answers, and a copied registration file must not put an instance elsewhere.
    """
    return _each(body, "endpoint", lambda item: _endpoint(item, service, region))


def resting(body: Any) -> dict[str, str]:
    """`/v1/health/connect/<service>` -> instance: lifecycle, of those that say they take no new request."""
    rows, _ = _each(body, "endpoint", lambda item: (_endpoint(item, "", "").instance, _lifecycle(item)))
    return {instance: lifecycle for instance, lifecycle in rows if lifecycle in RESTING}


def gateways(body: Any, region: str) -> tuple[tuple[Gateway, ...], Problems]:
    """`/v1/health/service/mesh-gateway?dc=<region>` -> gateways, sorted."""
    return _each(body, "gateway", lambda item: _gateway(item, region))


def proxies(body: Any) -> tuple[tuple[Proxy, ...], Problems]:
    """`/v1/health/service/<proxy service>` of the own datacenter -> the proxies that weir serves.

    Registrations without `weir_kind` are not ours and are passed over without a word.
    """
    ours = [item for item in _list(body) if _safe(item, "Service", "Meta", "weir_kind")]
    return _each(ours, "proxy", _proxy)


def intentions(body: Any) -> tuple[tuple[Intention, ...], Problems]:
    """`/v1/connect/intentions` -> intentions, sorted. L7 permissions (Consul >= 1.9) are a problem."""
    return _each(body, "intention", _intention)


def decode_leaf(body: Any) -> Leaf:
    """`/v1/agent/connect/ca/leaf/<service>` -> Leaf; cert_pem: the chain, leaf first. Raises DecodeError."""
    try:
        return Leaf(
            service=_text(body["Service"]),
            cert_pem=_text(body["CertPEM"]),
            key_pem=_text(body["PrivateKeyPEM"]),
            uri=_text(body["ServiceURI"]),
            serial=_text(body["SerialNumber"]),
            not_after=str(body.get("ValidBefore", "")),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        # Only the shape is told: the body holds a private key.
        raise DecodeError(f"leaf certificate: missing or wrong field ({type(error).__name__})") from None


def decode_roots(body: Any) -> Roots:
    """`/v1/agent/connect/ca/roots` -> Roots, the active one first; intermediates are no roots."""
    try:
        active = str(body.get("ActiveRootID", ""))
        rows = sorted(body["Roots"], key=lambda r: (r["ID"] != active, r["ID"]))
        pems = tuple(_text(row["RootCert"]) for row in rows)
        trust_domain = _text(body["TrustDomain"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DecodeError(f"CA roots: missing or wrong field ({type(error).__name__}: {error})") from error
    if not pems:
        raise DecodeError("CA roots: the list is empty")
    return Roots(trust_domain, pems, active)


def _endpoint(item: Any, service: str, region: str) -> Endpoint:
    entry, meta = item["Service"], _meta(item)
    proxy = entry.get("Proxy") or {}
    return Endpoint(
        service=service,
        region=region,
        stage=meta.get("stage") or STABLE,
        instance=proxy.get("DestinationServiceID") or entry["ID"].removesuffix(SIDECAR_SUFFIX),
        address=_address(item),
        port=_port(entry),
        zone=meta.get("zone", ""),
        version=meta.get("version", ""),
        model=meta.get("model", ""),
        tenant_class=meta.get("tenant_class", ""),
        health=_health(item),
        weight=_weight(entry),
    )


def _gateway(item: Any, region: str) -> Gateway:
    return Gateway(region, item["Service"]["ID"], _address(item), _port(item["Service"]), _health(item))


def _proxy(item: Any) -> Proxy:
    entry, meta = item["Service"], _meta(item)
    kind = ProxyKind(meta["weir_kind"])
    behind = entry.get("Proxy") or {}
    service = entry["Service"]
    if kind is ProxyKind.SIDECAR:
        service = _text(behind["DestinationServiceName"])
    return Proxy(
        id=_text(entry["ID"]),
        kind=kind,
        service=service,
        address=_address(item),
        port=_port(entry),
        token_sha256=_text(meta["xds_token_sha256"]),
        local_address=behind.get("LocalServiceAddress", "") if kind is ProxyKind.SIDECAR else "",
        local_port=behind.get("LocalServicePort", 0) if kind is ProxyKind.SIDECAR else 0,
        stage=meta.get("stage", ""),
        zone=meta.get("zone", ""),
        meta=meta,
    )


def _intention(item: Any) -> Intention:
    if item.get("Permissions"):
        raise ValueError("L7 permissions are not supported; write them in intentions/ instead")
    return Intention(
        destination=_text(item["DestinationName"]),
        source=_text(item["SourceName"]),
        action=Action(item["Action"]),
        description=item.get("Description", ""),
    )


def _health(item: Any) -> Health:
    """Worst of the checks; DRAINING and ASLEEP win over passing and warning, but a dead instance is dead.

    Maintenance mode (`consul maint`) is a wish to drain, told by a critical check of a reserved name.
    """
    checks = item.get("Checks") or ()
    wishes = [check for check in checks if check["CheckID"].startswith(_MAINTENANCE)]
    seen = {check["Status"] for check in checks if check not in wishes}
    worst = next((status for status in _WORST if status in seen), Health.PASSING)
    unknown = seen - set(Health)
    if unknown:
        raise ValueError(f"unknown check status {sorted(unknown)}")
    if worst is Health.CRITICAL:
        return worst
    lifecycle = _lifecycle(item)
    if lifecycle in RESTING and lifecycle != Health.DRAINING:
        return Health.ASLEEP
    return Health.DRAINING if wishes or lifecycle in RESTING else worst


def _lifecycle(item: Any) -> str:
    return str(_meta(item).get("lifecycle", ""))


def _address(item: Any) -> str:
    return _text(item["Service"].get("Address") or item["Node"]["Address"])


def _port(entry: Any) -> int:
    port = entry["Port"]
    if not isinstance(port, int) or not 0 < port < 65536:
        raise ValueError(f"port {port!r}")
    return port


def _weight(entry: Any) -> int:
    weight = (entry.get("Weights") or {}).get("Passing", 1)
    return weight if isinstance(weight, int) and weight > 0 else 1


def _meta(item: Any) -> Mapping[str, str]:
    meta: Mapping[str, str] = item["Service"].get("Meta") or {}
    return meta


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"expected text, got {type(value).__name__}")
    return value


def _list(body: Any) -> list[Any]:
    return body if isinstance(body, list) else []


def _safe(item: Any, *path: str) -> Any:
    for name in path:
        item = item.get(name) if isinstance(item, Mapping) else None
    return item


def _each(body: Any, what: str, decode: Callable[[Any], T]) -> tuple[tuple[T, ...], Problems]:
    if body is not None and not isinstance(body, list):
        return (), (f"{what}s: expected a list, got {type(body).__name__}",)
    values: list[T] = []
    problems: list[str] = []
    for position, item in enumerate(body or ()):
        try:
            values.append(decode(item))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            name = _safe(item, "Service", "ID") or _safe(item, "ID") or f"#{position}"
            problems.append(f"{what} {name}: {type(error).__name__}: {error}")
    return _sorted(values), tuple(problems)


def _sorted(values: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(sorted(values))
