"""What can go wrong between us and Consul, as errors a person can act on.

Law: pure. `classify` turns a status and a body into the error; no text here ever holds a token, since
the token travels in a header and Consul's own answers don't repeat it.
"""

from __future__ import annotations

from regions.cli.errors import WeirError

BODY_SHOWN = 300
"""Characters of an error body that are shown: enough for Consul's reason, not for a stack."""


class ConsulError(WeirError):
    """Consul said no, or said nothing. `status` is the HTTP status, 0 when there was no answer."""

    def __init__(self, status: int, what: str, why: str, way_out: str = "") -> None:
        self.status = status
        super().__init__(what, why, way_out)


class Unreachable(ConsulError):
    """No answer: refused, reset, timed out, or cut off in the middle of the body."""


class Forbidden(ConsulError):
    """403: the token is missing, unknown (perhaps only: not yet replicated) or may not do this."""


class TooMany(ConsulError):
    """429: the agent's limit of connections or requests per client."""


class NoLeader(ConsulError):
    """500: the datacenter has no leader just now."""


class NoPath(ConsulError):
    """500: this agent knows no way to the datacenter asked for, or the way is dead."""


class BadRequest(ConsulError):
    """4xx: the request itself is wrong; asking again can't help."""


_WAYS_OUT: dict[type[ConsulError], str] = {
    Forbidden: "give a token whose policy allows this (CONSUL_HTTP_TOKEN, CONSUL_HTTP_TOKEN_FILE; policies/)",
    TooMany: "raise limits.http_max_conns_per_client in the agent's configuration, or open fewer connections",
    NoLeader: "wait for the election, or bring back a majority of the datacenter's servers",
    NoPath: "check that the datacenter is up and WAN-joined (`consul members -wan`)",
}

# Dead ways to another datacenter come in several wordings (measured on 1.8.7): a datacenter nobody
# knows, one whose servers all left, and one whose servers are listed but don't answer.
_NO_PATH = (
    "No path to datacenter",
    "Remote DC has no server",
    "rpc error getting client",
    "stream closed",
    "failed to get conn",
    "i/o deadline reached",
    "lead thread didn't get connection",
    "connection reset by peer",
    "EOF",
)


def classify(status: int, what: str, body: str) -> ConsulError:
    """The error for an answer with this status (>= 400) and body. `what` names the call: `GET /v1/kv/x`."""
    why = f"{status} {' '.join(body.split())[:BODY_SHOWN]}".strip()
    kind = _kind(status, body)
    return kind(status, what, why, _WAYS_OUT.get(kind, ""))


def _kind(status: int, body: str) -> type[ConsulError]:
    if status == 403:
        return Forbidden
    if status == 429:
        return TooMany
    if 400 <= status < 500:
        return BadRequest
    if "No cluster leader" in body:
        return NoLeader
    if any(words in body for words in _NO_PATH):
        return NoPath
    return ConsulError
