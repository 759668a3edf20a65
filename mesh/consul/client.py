"""The Consul agent as the rest of the mesh sees it: KV, sessions, registration, Connect CA.

Law: what leaves is frozen values or plain JSON of one answer; every error is a ConsulError. Thin: one
method, one request; nothing is remembered between calls but open connections.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any, Self

from mesh.clock import Clock
from mesh.consul.answers import AgentInfo, agent_info
from mesh.consul.decode import decode_leaf, decode_roots
from mesh.consul.errors import BadRequest
from mesh.consul.kv import KvCalls
from mesh.consul.transport import Tls
from mesh.model import Leaf, Roots

DEFAULT_ADDRESS = "127.0.0.1:8500"
_YES = ("1", "t", "true", "yes")


class Consul(KvCalls):
    """One agent. `async with Consul("http://127.20.1.1:8500", token) as consul: ...`"""

    @classmethod
    def from_env(
        cls,
        env: Mapping[str, str] | None = None,
        *,
        address: str = "",
        clock: Clock | None = None,
        rng: Random | None = None,
    ) -> Self:
        """As the consul CLI reads the environment: CONSUL_HTTP_ADDR, _TOKEN, _TOKEN_FILE, _SSL, _SSL_VERIFY,
        CONSUL_CACERT, CONSUL_CLIENT_CERT, CONSUL_CLIENT_KEY. `address` given wins over CONSUL_HTTP_ADDR.
        Raises BadRequest for a socket address or an unreadable token file.
        """
        env = os.environ if env is None else env
        where = address or env.get("CONSUL_HTTP_ADDR") or DEFAULT_ADDRESS
        if "://" not in where:
            secure = env.get("CONSUL_HTTP_SSL", "").lower() in _YES
            where = f"{'https' if secure else 'http'}://{where}"
        tls = Tls(
            ca_file=env.get("CONSUL_CACERT", ""),
            cert_file=env.get("CONSUL_CLIENT_CERT", ""),
            key_file=env.get("CONSUL_CLIENT_KEY", ""),
            verify=env.get("CONSUL_HTTP_SSL_VERIFY", "true").lower() in _YES,
        )
        return cls(where, _token(env), clock=clock, rng=rng, tls=tls)

    async def register(self, body: Mapping[str, Any]) -> None:
        """Register a service (body: mesh.consul.register). Again with the same ID replaces it, checks too."""
        await self.exchange(
            "PUT",
            "/v1/agent/service/register",
            {"replace-existing-checks": "true"},
            json.dumps(body),
            accept=(200,),
        )

    async def deregister(self, service_id: str) -> None:
        """Take a service (and its sidecar) off this agent. One that isn't there is fine."""
        await self.exchange("PUT", f"/v1/agent/service/deregister/{service_id}", accept=(200, 404))

    async def check_ttl(self, check_id: str, status: str, note: str = "") -> None:
        """Report a TTL check: `passing`, `warning` or `critical`. ConsulError for an unknown check."""
        body = json.dumps({"Status": status, "Output": note})
        await self.exchange("PUT", f"/v1/agent/check/update/{check_id}", data=body, accept=(200,))

    async def services(self) -> dict[str, dict[str, Any]]:
        """Everything registered on this agent, by service id, as Consul's JSON."""
        body: dict[str, dict[str, Any]] = (await self.get("/v1/agent/services")).body
        return body

    async def self_info(self) -> AgentInfo:
        return agent_info((await self.get("/v1/agent/self")).body)

    async def leaf(
        self, service: str, index: int | None = None, wait_s: float | None = None
    ) -> tuple[int, Leaf]:
        """The Connect leaf of a service with its key; blocking reads end when the agent has renewed it."""
        answer = await self.get(f"/v1/agent/connect/ca/leaf/{service}", None, index, wait_s)
        return answer.index, decode_leaf(answer.body)

    async def roots(self, index: int | None = None, wait_s: float | None = None) -> tuple[int, Roots]:
        """All trusted Connect CA roots."""
        answer = await self.get("/v1/agent/connect/ca/roots", None, index, wait_s)
        return answer.index, decode_roots(answer.body)


def _token(env: Mapping[str, str]) -> str:
    if token := env.get("CONSUL_HTTP_TOKEN"):
        return token
    path = env.get("CONSUL_HTTP_TOKEN_FILE")
    if not path:
        return ""
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise BadRequest(
            0, f"CONSUL_HTTP_TOKEN_FILE {path}", error.strerror or type(error).__name__, "correct the path"
        ) from error
