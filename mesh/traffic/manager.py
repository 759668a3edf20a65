"""The traffic manager's hand: read, propose, commit, wait, history, undo.

Law: the only writer of config/traffic/ besides people and the control planes' carrying. Decides nothing by
itself: proposals and judgements are pure (proposal, safety, outcome). Every write is a compare-and-set in one
transaction with its audit entry.
"""

from __future__ import annotations

import asyncio
import getpass
import json
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from mesh.clock import Clock
from mesh.consul import decode, keys
from mesh.consul.answers import TxnOp
from mesh.consul.client import Consul
from mesh.consul.errors import ConsulError
from mesh.model import ServiceSpec
from mesh.traffic import epochs, outcome, plan, proposal
from mesh.traffic.epochs import Record
from mesh.traffic.outcome import Outcome
from mesh.traffic.plan import ConfigPage, Value
from mesh.traffic.proposal import Change, Proposal
from mesh.traffic.safety import Outlook
from mesh.traffic.values import parse_shares
from regions.cli.errors import Refused, UsageError
from regions.model import RegionSet

POLL_S = 0.05


def whoami() -> str:
    """Login name and host of the person at the terminal, for the audit entry."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):
        name = f"uid {os.getuid()}"
    return f"{name}@{os.uname().nodename}"


class Traffic:
    """Traffic of all regions, seen from region `here`. agents: one client per region that can be reached."""

    def __init__(
        self,
        agents: Mapping[str, Consul],
        here: str,
        regions: RegionSet,
        services: tuple[ServiceSpec, ...],
        clock: Clock,
    ) -> None:
        self.agents, self.here, self.regions, self.services, self.clock = (
            agents,
            here,
            regions,
            services,
            clock,
        )

    def spec(self, service: str) -> ServiceSpec:
        """The service's description. Raises UsageError naming the known ones."""
        for spec in self.services:
            if spec.name == service:
                return spec
        known = ", ".join(s.name for s in self.services)
        raise UsageError(f"service {service!r}", "not in the service catalog", f"known: {known}")

    async def documents(self, service: str) -> dict[str, Any]:
        """Status documents by region; a region that doesn't answer within 2 s is missing."""

        async def one(region: str, agent: Consul) -> tuple[str, Any]:
            try:
                async with asyncio.timeout(2.0):
                    entry = await agent.kv_get(keys.status(service, region))
            except (ConsulError, TimeoutError):
                return region, None
            return region, json.loads(entry.value) if entry else None

        found = await asyncio.gather(*(one(r, a) for r, a in self.agents.items()))
        return {region: body for region, body in found if body is not None}

    async def outlook(self, service: str) -> Outlook:
        """What is true now: values in force here, healthy instances everywhere, requests per second."""
        spec = self.spec(service)
        page = await self._page()
        effective = plan.resolve(service, page, await self._good(), self.regions)
        healthy: dict[tuple[str, str], int] = {}
        for region in self.regions.names:
            for end in await self._endpoints(service, region):
                if end.health in ("passing", "warning"):
                    healthy[(region, end.stage)] = healthy.get((region, end.stage), 0) + 1
        return Outlook(
            spec, healthy, effective.shares, effective.evacuated, effective.canary, await self._rps(service)
        )

    async def set_canary(self, service: str, weight: float, *, default: bool = False) -> Proposal:
        """Propose a canary weight: for this service, or with `default` for all that have none of their own.

        Without a key of its own a service follows the default key, and that is what is changed then.
        """
        own = keys.canary_weight(service)
        key = own if await self._entry(own) != (None, 0) and not default else keys.DEFAULT_CANARY
        if not 0.0 <= weight <= 1.0:
            raise UsageError("canary weight", f"{weight:g} is outside [0, 1]", "15 % is written 0.15")
        return proposal.canary(await self.outlook(service), await self._entry(key), weight, key)

    async def shift(self, service: str, shares: Mapping[str, float]) -> Proposal:
        """Propose region shares (any positive numbers; they are normalised). Raises ValueRefused."""
        whole = parse_shares(json.dumps(dict(shares)).encode(), self.regions.names)
        entry = await self._entry(keys.region_shares(service))
        return proposal.shift(await self.outlook(service), entry, whole)

    async def evacuate(self, service: str, region: str) -> Proposal:
        """Propose that `region` takes no new requests."""
        return await self._evacuation(service, region, out=True)

    async def restore(self, service: str, region: str) -> Proposal:
        """Propose that `region` takes requests again."""
        return await self._evacuation(service, region, out=False)

    async def commit(self, wanted: Proposal, change: Change) -> str:
        """Write it, with its audit entry. Returns the change id.

        Raises Refused when a safety rule says no (unless forced with a reason) or somebody was faster.
        """
        if wanted.refusals and not change.force:
            way = "if you must: --force --reason '…'"
            raise Refused(f"change of {wanted.key}", "; ".join(wanted.refusals), way)
        if wanted.refusals and not change.why:
            raise Refused(f"change of {wanted.key}", "--force needs a reason", "add --reason '…'")
        stamp = datetime.fromtimestamp(self.clock.time(), UTC).strftime("%Y%m%dT%H%M%S.%fZ")
        identity = os.urandom(4).hex()
        body = proposal.audit_body(wanted, change, self.here, stamp, identity)
        result = await self._agent.txn(
            [*_write(wanted), TxnOp.put(keys.audit(stamp, identity), json.dumps(body).encode())]
        )
        if not result.ok:
            why = "it was changed by somebody else meanwhile; nothing was written"
            raise Refused(f"change of {wanted.key}", why, "look again (weir traffic show) and repeat")
        return f"{stamp}-{identity}"

    async def wait(
        self, wanted: Outlook, *, timeout_s: float, tolerance: float, observe_s: float = 5.0
    ) -> Outcome:
        """Until applied everywhere, then up to `observe_s` until observed. A lagging change is an answer."""
        start = self.clock.monotonic()
        applied_at: float | None = None
        while True:
            names = tuple(self.agents)
            seen = outcome.judge(wanted, await self.documents(wanted.service.name), names, tolerance)
            now = self.clock.monotonic()
            applied_at = (applied_at or now) if seen.applied else None
            took = (applied_at or now) - start
            settled = seen.observed or (applied_at is not None and now - applied_at >= observe_s)
            if settled or (applied_at is None and now - start >= timeout_s):
                return Outcome(seen.applied, seen.observed, seen.details, seen.share, seen.requests, took)
            await self.clock.sleep(POLL_S)

    async def history(self, limit: int = 20) -> list[dict[str, Any]]:
        """Audit entries of all regions that answer, newest first."""
        entries: dict[str, dict[str, Any]] = {}
        for agent in self.agents.values():
            try:
                page = await agent.kv_list(keys.AUDIT)
            except ConsulError:
                continue
            for entry in page.entries:
                entries[entry.key] = json.loads(entry.value)
        return [entries[key] for key in sorted(entries, reverse=True)][:limit]

    async def undo(self, change_id: str = "") -> Proposal:
        """Propose what the change (default: the latest) replaced; Refused when its key was changed since."""
        entries = await self.history(limit=10_000)
        found = next((e for e in entries if change_id in ("", e["id"])), None)
        if found is None:
            raise UsageError(f"change {change_id!r}", "not in the history", "weir traffic history")
        before, index = await self._entry(found["key"])
        if before != found["after"]:
            why = f"{found['key']} is {before!r} now, not {found['after']!r} as that change left it"
            raise Refused(
                f"undo of {found['id']}", why, "undo the later change first, or set the value you want"
            )
        now = await self.outlook(found["service"])
        then = await self._after(found["key"], found["before"], now)
        return proposal.propose(found["key"], (before, index), found["before"], now, then)

    @property
    def _agent(self) -> Consul:
        return self.agents[self.here]

    async def _after(self, key: str, text: str | None, now: Outlook) -> Outlook:
        page = await self._page()
        values = {k: v for k, v in page.values.items() if k != key}
        if text is not None:
            values[key] = Value(text.encode(), 0)
        effective = plan.resolve(now.service.name, ConfigPage(values), await self._good(), self.regions)
        return Outlook(
            now.service, now.healthy, effective.shares, effective.evacuated, effective.canary, now.rps
        )

    async def _evacuation(self, service: str, region: str, *, out: bool) -> Proposal:
        if region not in self.regions.names:
            raise UsageError(f"region {region!r}", "unknown", f"known: {', '.join(self.regions.names)}")
        now = await self.outlook(service)
        after = {*now.evacuated, region} if out else {*now.evacuated} - {region}
        return proposal.evacuated(now, await self._entry(keys.evacuated(service)), tuple(sorted(after)))

    async def _entry(self, key: str) -> tuple[str | None, int]:
        entry = await self._agent.kv_get(key)
        return (entry.value.decode(errors="replace"), entry.modify_index) if entry else (None, 0)

    async def _page(self) -> ConfigPage:
        page = await self._agent.kv_list(keys.CONFIG)
        return ConfigPage({e.key: Value(e.value, e.modify_index) for e in page.entries}, True, page.index)

    async def _good(self) -> Mapping[str, bytes]:
        """The last good values, which stay in force where KV holds a refused one."""
        page = await self._agent.kv_list(keys.EPOCHS)
        found = {keys.config_of_epoch(e.key): Record.decode(e.value, e.modify_index) for e in page.entries}
        return epochs.last_good({key: record for key, record in found.items() if record is not None})

    async def _endpoints(self, service: str, region: str) -> tuple[Any, ...]:
        """Of one region, from its own agent, or through ours when it has none; () when it can't be asked."""
        agent = self.agents.get(region, self._agent)
        try:
            async with asyncio.timeout(2.0):
                body = (await agent.get(f"/v1/health/connect/{service}", {"dc": region})).body
        except (ConsulError, TimeoutError):
            return ()
        return decode.endpoints(body, service, region)[0]

    async def _rps(self, service: str) -> float | None:
        rates = []
        for body in (await self.documents(service)).values():
            seen = body.get("observed", {})
            if seen.get("requests") and seen.get("window_s"):
                rates.append(seen["requests"] / seen["window_s"])
        return sum(rates) if rates else None


def _write(wanted: Proposal) -> list[TxnOp]:
    if wanted.after is not None:
        return [TxnOp.cas(wanted.key, wanted.after.encode(), wanted.index)]
    if wanted.index:
        return [TxnOp.delete_cas(wanted.key, wanted.index)]
    return [TxnOp.check_not_exists(wanted.key)]
