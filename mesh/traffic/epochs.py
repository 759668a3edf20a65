"""Who wins a config key between regions: a last-writer-wins register with a Lamport epoch.

Law: pure. KV is per datacenter and Consul doesn't replicate it. Beside every config key stands a record
(mesh.consul.keys.epoch) with the value that won, its epoch and the region where it was written. Each control
plane writes its own datacenter only: it claims what a person wrote there, and adopts records of other regions
that win over its own. The order (epoch, origin) is total and the same everywhere, so all sides end on one
winner without asking one another, also after a partition.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from mesh.traffic.plan import ConfigPage


@dataclass(frozen=True, slots=True)
class Record:
    """One key's winner. value None: the key was deleted on purpose. at: unix seconds of the claim.

    index: ModifyIndex of the record in the datacenter it was read from (0: not stored yet).
    """

    epoch: int
    origin: str
    value: str | None
    at: float = 0.0
    index: int = 0

    @property
    def order(self) -> tuple[int, str]:
        return (self.epoch, self.origin)

    def encode(self) -> bytes:
        body = {"epoch": self.epoch, "origin": self.origin, "value": self.value, "at": self.at}
        return json.dumps(body, sort_keys=True).encode()

    @classmethod
    def decode(cls, raw: bytes, index: int) -> Record | None:
        """None for anything that is not a record: a stranger's text must not stop the mesh."""
        try:
            body = json.loads(raw)
            epoch, origin, value, at = body["epoch"], body["origin"], body["value"], body.get("at", 0.0)
        except (ValueError, KeyError, TypeError, AttributeError):
            return None
        if not isinstance(epoch, int) or isinstance(epoch, bool) or not isinstance(origin, str) or epoch < 1:
            return None
        if not isinstance(value, str | None) or not isinstance(at, int | float):
            return None
        return cls(epoch, origin, value, float(at), index)


@dataclass(frozen=True, slots=True)
class Write:
    """One compare-and-set to do in the own datacenter: config key and record together, or neither.

    config_index, record_index: what both must still be at (0: must not exist). A claim leaves the config key
    alone and only checks it.
    """

    key: str
    record: Record
    config_index: int
    record_index: int
    claim: bool
    reason: str


def decide(
    here: str,
    page: ConfigPage,
    mine: Mapping[str, Record],
    theirs: Iterable[Mapping[str, Record]],
    valid: Callable[[str, bytes], bool],
    now: float,
) -> tuple[Write, ...]:
    """What this region has to write so that all regions come to the same values.

    page: config of the own datacenter; mine: its records; theirs: the records of each other region that could
    be read. valid(key, raw): whether the value may be in force (an invalid one is never claimed, so it stays
    in its region). With the folder marker gone nothing is claimed as deleted.
    """
    others = list(theirs)
    names = sorted(set(page.values) | set(mine) | {key for records in others for key in records})
    writes = (
        _one(here, key, page, mine.get(key), [r[key] for r in others if key in r], valid, now)
        for key in names
    )
    return tuple(w for w in writes if w is not None)


def _one(
    here: str,
    key: str,
    page: ConfigPage,
    mine: Record | None,
    theirs: list[Record],
    valid: Callable[[str, bytes], bool],
    now: float,
) -> Write | None:
    entry = page.values.get(key)
    index = entry.index if entry else 0
    best = max(theirs, key=lambda r: r.order, default=None)
    top = max([r.epoch for r in theirs] + [mine.epoch if mine else 0])
    mine_index = mine.index if mine else 0
    written = _written_here(key, page, mine, valid)
    if written is not None:
        record = Record(top + 1, here, written.decode() if written else None, now)
        return Write(key, record, index, mine_index, True, "written here")
    if best is not None and (mine is None or best.order > mine.order):
        return Write(key, best, index, mine_index, False, f"{best.origin} wins with epoch {best.epoch}")
    return None


def _written_here(
    key: str, page: ConfigPage, mine: Record | None, valid: Callable[[str, bytes], bool]
) -> bytes | None:
    """The text a person put here since the last record; b"" for a deletion; None for nothing new.

    An adopted value and its record are written in one transaction and share one ModifyIndex, so whatever is
    newer than the record was written by somebody else.
    """
    entry = page.values.get(key)
    if entry is not None:
        newer = mine is None or entry.index > mine.index
        if newer and valid(key, entry.raw) and (mine is None or mine.value != entry.raw.decode()):
            return entry.raw
        return None
    gone = mine is not None and mine.value is not None and page.index > mine.index
    return b"" if gone and page.marker else None


def last_good(mine: Mapping[str, Record]) -> dict[str, bytes]:
    """The values in force by key, for mesh.traffic.plan.resolve."""
    return {key: record.value.encode() for key, record in mine.items() if record.value is not None}
