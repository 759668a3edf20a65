"""Between regions: whatever is written where and in which order, all sides end on one winner."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.traffic import epochs
from mesh.traffic.epochs import Record
from mesh.traffic.plan import ConfigPage, Value
from mesh.traffic.values import ValueRefused, parse_canary

KEY = "config/traffic/canary-weight"


def valid(key: str, raw: bytes) -> bool:
    try:
        parse_canary(raw)
    except ValueRefused:
        return False
    return True


@dataclass
class Datacenter:
    """A Consul of one region, reduced to one index, config keys and records, with compare-and-set."""

    name: str
    index: int = 1
    config: dict[str, Value] = field(default_factory=dict)
    records: dict[str, Record] = field(default_factory=dict)

    def put(self, text: str | None) -> None:
        self.index += 1
        if text is None:
            self.config.pop(KEY, None)
        else:
            self.config[KEY] = Value(text.encode(), self.index)

    def apply(self, write: epochs.Write) -> bool:
        entry, record = self.config.get(write.key), self.records.get(write.key)
        if (entry.index if entry else 0) != write.config_index or (
            record.index if record else 0
        ) != write.record_index:
            return False
        self.index += 1
        self.records[write.key] = replace(write.record, index=self.index)
        if not write.claim:
            if write.record.value is None:
                self.config.pop(write.key, None)
            else:
                self.config[write.key] = Value(write.record.value.encode(), self.index)
        return True

    def tick(self, others: list[Datacenter]) -> bool:
        page = ConfigPage(dict(self.config), True, self.index)
        writes = epochs.decide(self.name, page, self.records, [o.records for o in others], valid, 0.0)
        return sum(self.apply(write) for write in writes) > 0


def settle(dcs: list[Datacenter]) -> None:
    for _ in range(20):
        if not sum(dc.tick([o for o in dcs if o is not dc]) for dc in dcs):
            return
    raise AssertionError("the regions never come to rest")


texts = st.one_of(st.none(), st.sampled_from(["0.1", "0.2", "0.3", "abc"]))
steps = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 2), texts),
        st.tuples(st.just("tick"), st.integers(0, 2), st.sets(st.integers(0, 2))),
    ),
    max_size=30,
)


@given(steps)
@settings(max_examples=400)
def test_all_regions_end_on_one_winner_whatever_happened(script: list[tuple[str, int, object]]) -> None:
    dcs = [Datacenter(n) for n in ("a", "b", "c")]
    for what, who, arg in script:
        if what == "put":
            dcs[who].put(arg)  # type: ignore[arg-type]
        else:  # a tick that sees only some of the others: a partition
            dcs[who].tick([dcs[i] for i in arg if i != who])  # type: ignore[attr-defined]
    settle(dcs)
    winners = {dc.records[KEY].order if KEY in dc.records else None for dc in dcs}
    assert len(winners) == 1
    held = {dc.records[KEY].value for dc in dcs if KEY in dc.records}
    assert len(held) <= 1
    for dc in dcs:
        entry = dc.config.get(KEY)
        if entry is not None and valid(KEY, entry.raw):
            assert entry.raw.decode() in held


def test_two_writers_at_once_end_on_one_winner() -> None:
    dcs = [Datacenter(n) for n in ("a", "b", "c")]
    dcs[0].put("0.1")
    dcs[2].put("0.3")
    for dc in (dcs[0], dcs[2]):
        dc.tick([])
    settle(dcs)
    assert {dc.config[KEY].raw for dc in dcs} == {b"0.3"}  # equal epochs: the larger origin name


def test_a_refused_value_stays_in_its_region() -> None:
    dcs = [Datacenter(n) for n in ("a", "b")]
    dcs[0].put("0.1")
    settle(dcs)
    dcs[0].put("abc")
    settle(dcs)
    assert dcs[1].config[KEY].raw == b"0.1"
    assert dcs[0].config[KEY].raw == b"abc"
    assert epochs.last_good(dcs[0].records) == {KEY: b"0.1"}


def test_a_deletion_is_carried_and_a_wiped_prefix_is_not() -> None:
    dcs = [Datacenter(n) for n in ("a", "b")]
    dcs[0].put("0.1")
    settle(dcs)
    dcs[1].put(None)
    page = ConfigPage({}, False, dcs[1].index)
    assert epochs.decide("b", page, dcs[1].records, [], valid, 0.0) == ()
    settle(dcs)
    assert KEY not in dcs[0].config


def test_an_older_page_is_not_mistaken_for_a_deletion() -> None:
    dc = Datacenter("a")
    dc.put("0.1")
    dc.tick([])
    stale = ConfigPage({}, True, dc.records[KEY].index - 1)
    assert epochs.decide("a", stale, dc.records, [], valid, 0.0) == ()


def test_a_restored_snapshot_takes_the_newer_value_of_the_others() -> None:
    dcs = [Datacenter(n) for n in ("a", "b")]
    dcs[0].put("0.1")
    settle(dcs)
    old_config, old_records, old_index = dict(dcs[0].config), dict(dcs[0].records), dcs[0].index
    dcs[0].put("0.2")
    settle(dcs)
    dcs[0].config, dcs[0].records, dcs[0].index = old_config, old_records, old_index
    settle(dcs)
    assert dcs[0].config[KEY].raw == dcs[1].config[KEY].raw == b"0.2"


@given(st.binary(max_size=40), st.integers(0, 5))
def test_garbage_is_no_record(raw: bytes, index: int) -> None:
    record = Record.decode(raw, index)
    assert record is None or record.epoch >= 1


def test_a_record_survives_its_own_encoding() -> None:
    record = Record(3, "a", "0.15", 12.5, 7)
    assert Record.decode(record.encode(), 7) == record
