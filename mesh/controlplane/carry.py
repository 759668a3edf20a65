"""Carry what a person wrote in one region to the others: the writes that decide.writes asked for.

Law: writes the own datacenter's KV only, always by compare-and-set; a write that lost is dropped, since the
watch that made it stale brings the next decision.
"""

from __future__ import annotations

import logging
from typing import Protocol

from mesh.consul import keys
from mesh.consul.answers import TxnOp, TxnResult
from mesh.traffic.epochs import Record, Write
from mesh.traffic.plan import ConfigPage

log = logging.getLogger("weir.carry")


class Store(Protocol):
    """The one verb that is needed of Consul."""

    async def txn(self, ops: list[TxnOp], dc: str | None = None) -> TxnResult: ...


def operations(write: Write) -> list[TxnOp]:
    """Config key and record together or neither; a claim only checks the config key."""
    record_key = keys.epoch(write.key)
    record = TxnOp.cas(record_key, write.record.encode(), write.record_index)
    unchanged = (
        TxnOp.check_index(write.key, write.config_index)
        if write.config_index
        else TxnOp.check_not_exists(write.key)
    )
    if write.claim:
        return [unchanged, record]
    if write.record.value is not None:
        return [TxnOp.cas(write.key, write.record.value.encode(), write.config_index), record]
    gone = TxnOp.delete_cas(write.key, write.config_index) if write.config_index else unchanged
    return [gone, record]


def needs_marker(page: ConfigPage | None, records: dict[str, Record] | None) -> bool:
    """Whether this is a mesh without a past, whose folder key has to be made first."""
    return page is not None and not page.marker and records == {}


async def carry(store: Store, write: Write) -> bool:
    """Do one write. True when it was applied. Raises ConsulError when Consul doesn't answer."""
    result = await store.txn(operations(write))
    told = "applied" if result.ok else "lost to a newer write"
    log.info(
        "%s epoch %d of %s: %s, %s", write.key, write.record.epoch, write.record.origin, write.reason, told
    )
    return result.ok


async def make_marker(store: Store) -> bool:
    """Create the folder key unless it is there."""
    return (await store.txn([TxnOp.cas(keys.CONFIG, b"", 0)])).ok
