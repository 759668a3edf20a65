"""Carry what a person wrote in one region to the others: the writes that decide.writes asked for.

Law: writes the own datacenter's KV only, always by compare-and-set; a write that lost is dropped, since the
watch that made it stale brings the next decision.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from typing import Protocol

from mesh.consul import keys
from mesh.consul.answers import KvPage, TxnOp, TxnResult
from mesh.consul.errors import ConsulError
from mesh.controlplane.sources import epoch_records
from mesh.traffic.epochs import Record, Write
from mesh.traffic.plan import ConfigPage

log = logging.getLogger("weir.carry")

HEAR_S = 1.0
"""Longest wait for another region's records before a claim; what the own region sends doesn't wait for it."""


class Store(Protocol):
    """What is needed of Consul."""

    async def txn(self, ops: list[TxnOp], dc: str | None = None) -> TxnResult: ...
    async def kv_list(self, prefix: str, dc: str | None = None) -> KvPage: ...


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


async def hear(
    store: Store, regions: Iterable[str], known: Mapping[str, Mapping[str, Record]]
) -> dict[str, Mapping[str, Record]]:
    """`known` with the records of `regions` as they are now; one that doesn't answer stays as last heard.

    Asked before a claim. Watches may be far behind (this process was frozen, or has just started): an epoch
    counted from old news would let a change written last lose to one written long before (measured).
    """

    async def ask(region: str) -> tuple[str, Mapping[str, Record]] | None:
        try:
            async with asyncio.timeout(HEAR_S):
                return region, epoch_records(await store.kv_list(keys.EPOCHS, region))
        except (ConsulError, TimeoutError) as error:
            log.info("records of %s not heard before a claim: %s", region, error or "too slow")
            return None

    heard = await asyncio.gather(*map(ask, regions))
    return {**known, **dict(answer for answer in heard if answer is not None)}


async def make_marker(store: Store) -> bool:
    """Create the folder key unless it is there."""
    return (await store.txn([TxnOp.cas(keys.CONFIG, b"", 0)])).ok
