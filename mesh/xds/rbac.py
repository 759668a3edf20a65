"""Intentions as Envoy RBAC: who may call the service behind one sidecar.

Law: pure. Precedence is decided here, by `intentions.precedence`, not by the order of Envoy's policies: the
rules that come out are flat. What no intention allows is denied, also when there are no intentions at all.
"""

from __future__ import annotations

import re

from intentions.model import WILDCARD, Intention
from intentions.precedence import decide, for_destination
from mesh.xds.pb import Json

_ANYTHING: Json = {"any": True}

_NOBODY_IN_PARTICULAR = "\0"
"""No Consul service can have this name, so only wildcard sources match it."""


def rules(intentions: tuple[Intention, ...], service: str, trust_domain: str) -> Json:
    """RBAC rules (action ALLOW) of a sidecar of `service`.

    Sources named in some intention get their own decision; `policies` then says: these sources, and, when
    the wildcard is allowed, every other identity of the trust domain.
    """
    relevant = for_destination(intentions, service)
    named = sorted({i.source for i in relevant} - {WILDCARD})
    verdicts = {source: decide(relevant, source, service).allowed for source in named}
    policies: Json = {}
    for source in named:
        if verdicts[source]:
            policies[f"from-{source}"] = _policy([_is(source, trust_domain)])
    if decide(relevant, _NOBODY_IN_PARTICULAR, service).allowed:
        denied = [_is(source, trust_domain) for source in named if not verdicts[source]]
        anyone = _is(None, trust_domain)
        principal = {"and_ids": {"ids": [anyone, *({"not_id": d} for d in denied)]}} if denied else anyone
        policies["from-anyone"] = _policy([principal])
    return {"action": "ALLOW", "policies": policies}


def mesh_members(trust_domain: str) -> Json:
    """Rules that let in every identity of the mesh: for the health path alone."""
    return {"action": "ALLOW", "policies": {"mesh": _policy([_is(None, trust_domain)])}}


def nobody() -> Json:
    """Rules without a policy: everything is denied. The base under every route."""
    return {"action": "ALLOW", "policies": {}}


def _policy(principals: list[Json]) -> Json:
    return {"permissions": [_ANYTHING], "principals": principals}


def _is(source: str | None, trust_domain: str) -> Json:
    """The SPIFFE id of a service in any datacenter of the trust domain; None: of any service."""
    service = "[^/]+" if source is None else re.escape(source)
    pattern = f"spiffe://{re.escape(trust_domain)}/ns/default/dc/[^/]+/svc/{service}"
    return {"authenticated": {"principal_name": {"safe_regex": {"regex": pattern}}}}
