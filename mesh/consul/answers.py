"""What Consul's HTTP answers become: frozen values, and the transaction operations that go in.

Law: pure. Text in, values out; no I/O.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MAX_TXN_OPS = 64
"""Consul 1.8 to 1.13 refuse more in one transaction."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer to a read.

    index: X-Consul-Index, 0 when the endpoint has none. body: parsed JSON, None for a 404 (nothing there).
    known_leader, last_contact_ms: only told by the server for reads in stale mode; else True and 0.
    """

    index: int
    body: Any
    known_leader: bool = True
    last_contact_ms: int = 0


@dataclass(frozen=True, slots=True)
class KvEntry:
    """One key. Indexes are Raft indexes of the datacenter it lives in; lock_index counts acquisitions."""

    key: str
    value: bytes
    modify_index: int
    create_index: int
    lock_index: int = 0
    session: str = ""
    flags: int = 0


@dataclass(frozen=True, slots=True)
class KvPage:
    """All keys under a prefix. `index` is the one to block on; no entries is a valid page."""

    index: int
    entries: tuple[KvEntry, ...]


@dataclass(frozen=True, slots=True)
class TxnOp:
    """One operation of a KV transaction; build it with the class methods."""

    verb: str
    key: str
    value: bytes | None = field(default=None, repr=False)
    index: int | None = None

    @classmethod
    def put(cls, key: str, value: bytes) -> TxnOp:
        return cls("set", key, value)

    @classmethod
    def cas(cls, key: str, value: bytes, index: int) -> TxnOp:
        """Write only if the key's modify index is `index`; 0 means: only if it doesn't exist."""
        return cls("cas", key, value, index)

    @classmethod
    def delete(cls, key: str) -> TxnOp:
        return cls("delete", key)

    @classmethod
    def delete_cas(cls, key: str, index: int) -> TxnOp:
        return cls("delete-cas", key, None, index)

    @classmethod
    def check_index(cls, key: str, index: int) -> TxnOp:
        """Fail the whole transaction unless the key's modify index is `index`."""
        return cls("check-index", key, None, index)

    @classmethod
    def check_not_exists(cls, key: str) -> TxnOp:
        return cls("check-not-exists", key)

    def as_json(self) -> dict[str, Any]:
        body: dict[str, Any] = {"Verb": self.verb, "Key": self.key}
        if self.value is not None:
            body["Value"] = base64.b64encode(self.value).decode("ascii")
        if self.index is not None:
            body["Index"] = self.index
        return {"KV": body}


@dataclass(frozen=True, slots=True)
class TxnError:
    """Why an operation (by its position) stopped the transaction."""

    op: int
    why: str


@dataclass(frozen=True, slots=True)
class TxnResult:
    """ok: everything was applied. errors: else nothing was, and these operations are why."""

    ok: bool
    errors: tuple[TxnError, ...] = ()


@dataclass(frozen=True, slots=True)
class AgentInfo:
    """Who the agent is. version like "1.8.7"; primary_datacenter empty when the agent names none."""

    version: str
    datacenter: str
    node: str
    server: bool
    primary_datacenter: str = ""

    @property
    def version_tuple(self) -> tuple[int, ...]:
        """Numbers of the version, for comparing: "1.8.7" -> (1, 8, 7), "1.16.1+ent" -> (1, 16, 1)."""
        plain = self.version.split("+")[0].split("-")[0]
        return tuple(int(part) for part in plain.split(".") if part.isdigit())


def kv_entry(item: Mapping[str, Any]) -> KvEntry:
    """One element of a KV answer. A null Value is the empty value."""
    return KvEntry(
        key=item["Key"],
        value=base64.b64decode(item["Value"] or ""),
        modify_index=item["ModifyIndex"],
        create_index=item["CreateIndex"],
        lock_index=item.get("LockIndex", 0),
        session=item.get("Session", ""),
        flags=item.get("Flags", 0),
    )


def txn_result(status: int, body: Mapping[str, Any]) -> TxnResult:
    """Body of `PUT /v1/txn`: 200 applied, 409 refused by a check."""
    errors: Sequence[Mapping[str, Any]] = body.get("Errors") or ()
    return TxnResult(status == 200, tuple(TxnError(e["OpIndex"], e["What"]) for e in errors))


def agent_info(body: Mapping[str, Any]) -> AgentInfo:
    """Body of `/v1/agent/self`."""
    config = body["Config"]
    return AgentInfo(
        version=config.get("Version", ""),
        datacenter=config["Datacenter"],
        node=config["NodeName"],
        server=bool(config.get("Server")),
        primary_datacenter=body.get("DebugConfig", {}).get("PrimaryDatacenter")
        or config.get("PrimaryDatacenter", ""),
    )
