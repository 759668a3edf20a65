"""Carrying config between regions, on a store that answers as the test wants, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from random import Random
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from mesh.consul import keys
from mesh.consul.answers import KvEntry, KvPage, TxnOp, TxnResult
from mesh.consul.errors import Unreachable
from mesh.controlplane import carry
from mesh.controlplane.carrier import Carrier
from mesh.controlplane.metrics import PlaneMetrics
from mesh.controlplane.plane import Plane
from mesh.fold import Facts
from mesh.traffic.epochs import Record
from mesh.traffic.plan import ConfigPage, Value
from tests.virtual import run
from tests.xds_samples import regions

KEY = keys.DEFAULT_CANARY
REGIONS = regions()
HERE, FAR, DEAD = REGIONS.names[0], REGIONS.names[1], "dead"


class Clock:
    def monotonic(self) -> float:
        return 0.0

    def time(self) -> float:
        return 1_000.0

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class Store:
    """records: what the KV of each other region holds now. A region that is not there hangs."""

    def __init__(self, records: Mapping[str, Record], refuses: str = "") -> None:
        self.records, self.refuses = records, refuses
        self.asked: list[str] = []
        self.done: list[list[TxnOp]] = []

    async def txn(self, ops: list[TxnOp], dc: str | None = None) -> TxnResult:
        assert dc is None, "only the own datacenter is written"
        self.done.append(ops)
        return TxnResult(True, ())

    async def kv_list(self, prefix: str, dc: str | None = None) -> KvPage:
        assert (prefix, dc is not None) == (keys.EPOCHS, True)
        self.asked.append(str(dc))
        if dc == self.refuses:
            raise Unreachable(0, "GET", "refused")
        if dc not in self.records:
            await asyncio.sleep(3600)
        return KvPage(9, (KvEntry(keys.epoch(KEY), self.records[str(dc)].encode(), 9, 9),))


def plane() -> Plane:
    """A plane where a person has just written 0.3, and that knows of epoch 4 only."""
    made = Plane(Facts(HERE, REGIONS, ()), Clock(), PlaneMetrics(CollectorRegistry()))
    made.page(ConfigPage({KEY: Value(b"0.3", 50)}, True, 50))
    made.records(HERE, {KEY: Record(4, FAR, "0.1", index=40)})
    made.records(FAR, {KEY: Record(4, FAR, "0.1")})
    return made


def claimed(store: Store) -> Record:
    """The record of the one transaction that was done."""
    [ops] = store.done
    record = Record.decode(ops[1].value or b"", 0)
    assert record is not None
    return record


@pytest.mark.parametrize(("failures", "epoch"), [(0, 8), (1, 8), (3, 5)])
def test_a_claim_counts_from_what_the_others_hold_now_unless_they_are_known_silent(
    failures: int, epoch: int
) -> None:
    """The watch of the other region is behind by epochs 5 to 7, as after a freeze of this process."""
    store = Store({FAR: Record(7, FAR, "0.2")})
    watches = {f"epochs/{FAR}": SimpleNamespace(failures=failures)}
    run(Carrier(store, plane(), lambda: watches, Clock(), Random(1)).once())  # type: ignore[arg-type, return-value]
    record = claimed(store)
    assert (record.epoch, record.origin, record.value) == (epoch, HERE, "0.3")
    assert store.asked == ([FAR] if failures < 3 else [])


def test_a_region_that_hangs_or_refuses_holds_a_claim_up_for_a_moment_only() -> None:
    known = {FAR: {KEY: Record(3, FAR, "0.1")}, DEAD: {KEY: Record(2, DEAD, "0.1")}}

    async def story() -> tuple[dict[str, Mapping[str, Record]], float]:
        heard = await carry.hear(Store({}, refuses=FAR), (FAR, DEAD), known)
        return heard, asyncio.get_running_loop().time()

    heard, took = run(story())
    assert heard == known
    assert took == carry.HEAR_S


def test_nobody_is_asked_when_there_is_nothing_to_claim() -> None:
    store, made = Store({FAR: Record(7, FAR, "0.2")}), plane()
    made.page(ConfigPage({KEY: Value(b"0.1", 40)}, True, 50))
    run(Carrier(store, made, dict, Clock(), Random(1)).once())
    assert (store.asked, store.done) == ([], [])
