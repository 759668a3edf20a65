"""Who may read whose configuration: node id and token against the registrations.

Law: pure. A token is compared by its sha256 and in constant time; no message names another proxy or a hash.
A proxy that is right gets its own resources; whoever is wrong is told what is wrong with *him* and nothing
else.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Mapping
from enum import StrEnum

from mesh.model import Proxy


class Why(StrEnum):
    """Reason of a refusal; also the metric label."""

    UNKNOWN = "unknown-node"
    """Not registered (yet): Envoy is to come again."""
    TOKEN = "wrong-token"  # noqa: S105 - a reason, not a secret
    """The node exists; the token is missing or is nobody's."""
    STOLEN = "token-of-another"
    """A right token, but of another proxy than the node id names."""


class Denied(Exception):
    """Access refused."""

    def __init__(self, why: Why, message: str) -> None:
        self.why = why
        super().__init__(message)


Authenticate = Callable[[str, str], Proxy | None]
"""(node id, token) → the proxy; None or Denied when it is not to be served."""


def digest(token: str) -> str:
    """Hex sha256 of a token, as it stands in the Consul registration (`meta.xds_token_sha256`)."""
    return hashlib.sha256(token.encode()).hexdigest()


def authenticator(proxies: Callable[[], Mapping[str, Proxy]]) -> Authenticate:
    """An `Authenticate` over the proxies registered now, by node id."""
    return lambda node_id, token: check(proxies(), node_id, token)


def check(proxies: Mapping[str, Proxy], node_id: str, token: str) -> Proxy:
    """The proxy of this node id, if the token is its own. Raises Denied."""
    presented = digest(token)
    proxy = proxies.get(node_id)
    if proxy is not None and token and hmac.compare_digest(presented, proxy.token_sha256):
        return proxy
    if token and any(hmac.compare_digest(presented, other.token_sha256) for other in proxies.values()):
        raise Denied(Why.STOLEN, f"this token does not belong to node {node_id!r}")
    if proxy is None:
        raise Denied(Why.UNKNOWN, f"node {node_id!r} is not registered in Consul (yet)")
    raise Denied(Why.TOKEN, f"node {node_id!r}: missing or wrong token in metadata x-weir-proxy-token")
