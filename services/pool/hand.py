"""The operator's hand on the pool: reads it from each region's Consul, drives the instances' admin doors.

Law: asks and reports; whether something may sleep is decided in plan.py, what a verb does by the instance. A
region or a door that doesn't answer is a fact, not the end.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from mesh.consul import keys
from mesh.consul.client import Consul
from mesh.consul.errors import ConsulError
from services.pool.plan import Member, members, share

ANSWER_S = 3.0
STATE_S = 2.0


@dataclass(frozen=True, slots=True)
class Pool:
    """What all regions that answer know. silent: regions that don't, with the reason. problems: entries that
    made no sense. documents: status documents of the service by region."""

    members: tuple[Member, ...]
    silent: Mapping[str, str]
    problems: tuple[str, ...]
    documents: Mapping[str, Mapping[str, Any]]

    def traffic(self, who: Member) -> float | None:
        """Largest share that any ingress sends to this member's (region, stage); None: nobody knows."""
        shares = [share(document, who.region, who.stage) for document in self.documents.values()]
        known = [value for value in shares if value is not None]
        return max(known, default=None)


@dataclass(frozen=True, slots=True)
class Said:
    """What a door answered. status 0: nothing did, `body["error"]` says why."""

    status: int
    body: Mapping[str, Any]

    @property
    def ok(self) -> bool:
        return self.status == 200

    @property
    def error(self) -> str:
        return "" if self.ok else str(self.body.get("error") or f"status {self.status}")


def settled(said: Said, wanted: str) -> Said:
    """Good when it refused only because it is as `wanted` already: an operator may ask twice."""
    code = (said.body.get("outcome") or {}).get("code")
    if code != "wrong_state" or said.body.get("lifecycle") != wanted:
        return said
    return Said(200, {"lifecycle": wanted, "already": True})


async def read(agents: Mapping[str, Consul], service: str) -> Pool:
    """All regions at once."""
    answers = await asyncio.gather(*(_region(agent, service, name) for name, agent in agents.items()))
    found: list[Member] = []
    silent: dict[str, str] = {}
    problems: list[str] = []
    documents: dict[str, Mapping[str, Any]] = {}
    for region, (rows, document, why) in zip(agents, answers, strict=True):
        if why:
            silent[region] = why
            continue
        good, bad = members(rows, region)
        found += good
        problems += bad
        if document is not None:
            documents[region] = document
    return Pool(tuple(sorted(found)), silent, tuple(problems), documents)


async def _region(agent: Consul, service: str, region: str) -> tuple[Any, Mapping[str, Any] | None, str]:
    try:
        async with asyncio.timeout(ANSWER_S):
            rows = (await agent.get(f"/v1/health/service/{service}")).body
            entry = await agent.kv_get(keys.status(service, region))
    except TimeoutError:
        return None, None, f"no answer within {ANSWER_S:g} s"
    except ConsulError as error:
        return None, None, error.why
    return rows, _document(entry.value if entry is not None else b""), ""


def _document(value: bytes) -> Mapping[str, Any] | None:
    try:
        body = json.loads(value)
    except ValueError:
        return None
    return body if isinstance(body, dict) else None


class Doors:
    """Admin doors of instances. `async with Doors(limit_s) as doors`. limit_s: longest verb."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Doors:
        self._http = aiohttp.ClientSession()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._http is not None:
            await self._http.close()

    async def sleep(self, who: Member, level: int) -> Said:
        return await self._ask(who, "POST", "/sleep", {"level": str(level)}, self._limit_s)

    async def wake(self, who: Member, device: str) -> Said:
        query = {"device": device} if device else {}
        return await self._ask(who, "POST", "/wake", query, self._limit_s)

    async def state(self, who: Member) -> Said:
        return await self._ask(who, "GET", "/state", {}, STATE_S)

    async def states(self, pool: Pool) -> dict[tuple[str, str], Said]:
        """Of all that have a door, by (region, instance)."""
        asked = [m for m in pool.members if m.admin]
        calls: list[Awaitable[Said]] = [self.state(m) for m in asked]
        return {(m.region, m.instance): s for m, s in zip(asked, await asyncio.gather(*calls), strict=True)}

    async def _ask(self, who: Member, method: str, path: str, query: dict[str, str], limit_s: float) -> Said:
        assert self._http is not None
        if not who.admin:
            return Said(0, {"error": "it has no admin door (start it with --admin)"})
        url, limit = f"http://{who.admin}{path}", aiohttp.ClientTimeout(total=limit_s)
        try:
            async with self._http.request(method, url, params=query, timeout=limit) as answer:
                body = await answer.json(content_type=None)
                return Said(answer.status, body if isinstance(body, dict) else {})
        except TimeoutError:
            return Said(0, {"error": f"its admin door {who.admin} gave no answer within {limit_s:g} s"})
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return Said(0, {"error": f"its admin door {who.admin} doesn't answer: {error}"})
