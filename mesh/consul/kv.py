"""KV, transactions and sessions of an agent.

Law: one method, one request; no retry of a write, since a lost answer doesn't tell whether it was applied.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from mesh.consul.answers import MAX_TXN_OPS, KvEntry, KvPage, TxnOp, TxnResult, kv_entry, txn_result
from mesh.consul.errors import BadRequest
from mesh.consul.keys import MAX_VALUE_BYTES
from mesh.consul.transport import Transport


def _drop_none(**params: str | int | None) -> dict[str, str]:
    return {name: str(value) for name, value in params.items() if value is not None}


class KvCalls(Transport):
    """Every method takes `dc`: another datacenter's KV is reached through this agent; None means its own."""

    async def kv_get(self, key: str, dc: str | None = None) -> KvEntry | None:
        """The entry, or None when the key doesn't exist."""
        answer = await self.get(f"/v1/kv/{key}", _drop_none(dc=dc))
        return kv_entry(answer.body[0]) if answer.body else None

    async def kv_list(
        self, prefix: str, dc: str | None = None, index: int | None = None, wait_s: float | None = None
    ) -> KvPage:
        """All entries under a prefix, sorted by key. Nothing there is an empty page, not an error."""
        params = {"recurse": ""} | _drop_none(dc=dc)
        answer = await self.get(f"/v1/kv/{prefix}", params, index, wait_s)
        return KvPage(answer.index, tuple(kv_entry(item) for item in answer.body or ()))

    async def kv_put(
        self,
        key: str,
        value: bytes,
        cas: int | None = None,
        dc: str | None = None,
        acquire: str | None = None,
        release: str | None = None,
    ) -> bool:
        """Write. False when `cas` (modify index; 0: must not exist) or `acquire`/`release` (session) said no.

        Writing what is there already succeeds and leaves the modify index as it is (measured on 1.8.7), also
        with `cas`: two writers of the same value both win, and neither fences off a third.
        Raises BadRequest without asking for a value over 512 KiB.
        """
        if len(value) > MAX_VALUE_BYTES:
            raise BadRequest(
                413,
                f"KV key {key}",
                f"the value has {len(value)} bytes, Consul takes at most {MAX_VALUE_BYTES}",
                "make the value smaller",
            )
        params = _drop_none(dc=dc, cas=cas, acquire=acquire, release=release)
        raw = await self.exchange("PUT", f"/v1/kv/{key}", params, value, accept=(200,))
        return raw.text.strip() == "true"

    async def kv_delete(
        self, key: str, cas: int | None = None, recurse: bool = False, dc: str | None = None
    ) -> bool:
        """Delete a key; with `recurse` all under it. True also if nothing was there; False: cas said no."""
        params = _drop_none(dc=dc, cas=cas) | ({"recurse": ""} if recurse else {})
        raw = await self.exchange("DELETE", f"/v1/kv/{key}", params, accept=(200,))
        return raw.text.strip() == "true"

    async def txn(self, ops: Sequence[TxnOp], dc: str | None = None) -> TxnResult:
        """All of the operations or none. A failed check is a result, not an error."""
        if len(ops) > MAX_TXN_OPS:
            raise BadRequest(413, "KV transaction", f"{len(ops)} operations, Consul takes {MAX_TXN_OPS}")
        body = json.dumps([op.as_json() for op in ops])
        raw = await self.exchange("PUT", "/v1/txn", _drop_none(dc=dc), body, accept=(200, 409))
        return txn_result(raw.status, json.loads(raw.text))

    async def session_create(
        self, ttl_s: float, lock_delay_s: float, name: str, behavior: str = "release", dc: str | None = None
    ) -> str:
        """The id of a new session. Consul: ttl 10 s to 24 h, lock delay 0 to 60 s; may live up to 2 × ttl."""
        body: Mapping[str, str] = {
            "Name": name,
            "TTL": f"{round(ttl_s * 1000)}ms",
            "LockDelay": f"{round(lock_delay_s * 1000)}ms",
            "Behavior": behavior,
        }
        raw = await self.exchange(
            "PUT", "/v1/session/create", _drop_none(dc=dc), json.dumps(body), accept=(200,)
        )
        return str(json.loads(raw.text)["ID"])

    async def session_renew(self, session: str, dc: str | None = None) -> bool:
        """False when the session is gone: whatever it locked is no longer ours."""
        raw = await self.exchange("PUT", f"/v1/session/renew/{session}", _drop_none(dc=dc))
        return raw.status == 200

    async def session_destroy(self, session: str, dc: str | None = None) -> None:
        """End a session; its locks are released or deleted (its behavior). One that is gone is fine."""
        await self.exchange("PUT", f"/v1/session/destroy/{session}", _drop_none(dc=dc))
