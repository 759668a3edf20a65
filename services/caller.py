"""Who asks, and on what terms: what the headers of a request say.

Law: pure. Headers in, a frozen value out; a header that can't be read counts as absent, since proxies write
them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from services import tenants
from services.tenants import Tenant, Tenants

REQUEST_ID = "x-request-id"
DEADLINE, ENVOY_DEADLINE = "x-weir-deadline-ms", "x-envoy-expected-rq-timeout-ms"
CARRIED = (
    "traceparent",
    "tracestate",
    "baggage",
    "b3",
    "x-b3-traceid",
    "x-b3-spanid",
    "x-b3-parentspanid",
    "x-b3-sampled",
    "x-b3-flags",
    REQUEST_ID,
)
"""What goes on to an upstream server as it came when nobody traces here."""
_SAFE_ID = re.compile(r"[!-~]{1,128}")
_MAX_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Caller:
    """deadline_s: for the whole answer. first_byte_s: until the first byte of it. Seconds from now, or None.

    Envoy's header is the limit of one try, which it drops once an answer has begun, so that for a stream it
    bounds the first token alone; an answer in one piece has its first byte at its end.
    """

    request_id: str
    tenant: Tenant
    deadline_s: float | None
    first_byte_s: float | None
    carried: Mapping[str, str]

    @property
    def own_limit(self) -> bool:
        """Whether it is not the mesh's limit for one try that bounds the first byte."""
        return self.deadline_s == self.first_byte_s


def read(headers: Mapping[str, str], table: Tenants, new_id: str) -> Caller:
    """headers: names in any case. new_id: used where the request brings no id that may stand in a log."""
    given = headers.get(REQUEST_ID, "")
    own, envoy = _seconds(headers.get(DEADLINE)), _seconds(headers.get(ENVOY_DEADLINE))
    limits = [limit for limit in (own, envoy) if limit is not None]
    request_id = given if _SAFE_ID.fullmatch(given) else new_id
    carried = {name: headers[name] for name in CARRIED if name in headers}
    return Caller(
        request_id=request_id,
        tenant=table.of(headers.get(tenants.HEADER)),
        deadline_s=own,
        first_byte_s=min(limits, default=None),
        carried={**carried, REQUEST_ID: request_id},
    )


def _seconds(text: str | None) -> float | None:
    """Of milliseconds. 0 or less has passed already."""
    try:
        ms = float(text or "nan")
    except ValueError:
        return None
    return None if math.isnan(ms) else min(_MAX_S, max(0.0, ms / 1000))
