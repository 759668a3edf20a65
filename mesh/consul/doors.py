"""The intentions door: one way to read and write intentions, whatever the Consul version.

Law: the only place that knows which API an agent speaks. `open_intentions` asks the agent for its version
once and gives a ConfigEntryDoor (>= 1.9: `service-intentions` config entries, compare-and-set per
destination) or a LegacyDoor (1.8: /v1/connect/intentions by id; it knows no config entry of that kind). Both
read /v1/connect/intentions, which exists and blocks on every version.
Writes, and the reads they are planned from, go to the primary datacenter, where intentions live. Consul
copies them to the others, late (once in 5 s); who watches reads both, so as to be quick while the primary is
there and to go on while it is away (mesh.controlplane.two_copies).

Seen on a real 1.8.7: all of LegacyDoor. NOT seen on a real agent: ConfigEntryDoor, whose wire shape is taken
from Consul's documentation and sources and tested against a stand-in (tests/unit/test_intentions_doors.py).
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any
from urllib.parse import quote

from intentions.model import Action, Intention
from intentions.plan import IntentionPlan, Put, pair, plan
from intentions.precedence import for_destination
from intentions.render import (
    KIND,
    L7,
    Foreign,
    enforceable,
    entry_intentions,
    legacy_body,
    merged_entry,
    read_rows,
)
from mesh.consul.client import Consul
from mesh.consul.errors import ConsulError
from regions.cli.errors import Refused

LIST = "/v1/connect/intentions"
CONFIG_ENTRIES_SINCE = (1, 9)
TRIES = 5
"""Rounds against other writers before giving up; a lost round means that another write went through."""


@dataclass(frozen=True, slots=True)
class Contents:
    """What Consul holds. foreign: rules that weir can't express and therefore leaves alone."""

    ours: tuple[Intention, ...]
    foreign: tuple[Foreign, ...] = ()


class IntentionsDoor(ABC):
    """Intentions of the whole mesh through one agent. Every call raises ConsulError when Consul says no.

    primary: name of the primary datacenter; empty means that the agent's own datacenter is the only one.
    """

    def __init__(self, consul: Consul, primary: str = "") -> None:
        self.consul = consul
        self._at = {"dc": primary} if primary else {}

    async def read(self) -> Contents:
        """Everything, from the primary datacenter."""
        return Contents(*read_rows((await self.consul.get(LIST, self._at)).body or ()))

    async def list(self) -> tuple[Intention, ...]:
        """Our intentions, from the primary datacenter, sorted by destination and source."""
        return (await self.read()).ours

    async def match(self, destination: str) -> tuple[Intention, ...]:
        """The rules that can decide a call to this service, in deciding order, foreign L7 ones as denies."""
        now = await self.read()
        return for_destination(enforceable(now.ours, now.foreign), destination)

    async def watch_fetch(self, index: int | None, wait_s: float) -> tuple[int, tuple[Intention, ...]]:
        """One blocking read of what proxies here enforce: (index for the next call, intentions).

        Reads the agent's own datacenter. Returns at once for index 0 or None, else on a change or after
        `wait_s`.
        """
        return await self._watch({}, index, wait_s)

    async def watch_primary(self, index: int | None, wait_s: float) -> tuple[int, tuple[Intention, ...]]:
        """The same from the primary datacenter: sooner than the local copy, as long as it can be reached."""
        return await self._watch(self._at, index, wait_s)

    async def _watch(
        self, at: Mapping[str, str], index: int | None, wait_s: float
    ) -> tuple[int, tuple[Intention, ...]]:
        answer = await self.consul.get(LIST, at, index, wait_s)
        return answer.index, enforceable(*read_rows(answer.body or ()))

    async def replace_all(self, want: Iterable[Intention]) -> IntentionPlan:
        """Make Consul's content equal `want`; gives the plan that was carried out.

        Raises Refused, before anything is written, when a wanted pair is taken by a foreign rule.
        """
        now = await self.read()
        todo = plan(now.ours, want)
        refuse_foreign(todo, now.foreign)
        await self.carry_out(todo)
        return todo

    async def carry_out(self, todo: IntentionPlan) -> None:
        """Do what the plan says. Not atomic: denies are written first and deletes last, so that in between
        nothing is open that is closed both before and after.
        """
        for put in sorted(todo.puts, key=lambda p: (p.new.action is Action.ALLOW, pair(p.new))):
            await self.put(put.new)
        for gone in sorted(todo.deletes, key=lambda i: (i.action is Action.DENY, pair(i))):
            await self.delete(gone.source, gone.destination)

    @abstractmethod
    async def put(self, intention: Intention) -> None:
        """Write one, in place of what there is for its pair. Raises Refused when that is a foreign rule."""

    @abstractmethod
    async def delete(self, source: str, destination: str) -> bool:
        """Remove one. False when there was none."""


class LegacyDoor(IntentionsDoor):
    """Consul 1.8: intentions have ids; a pair is unique, a second POST for it is refused."""

    async def put(self, intention: Intention) -> None:
        for _ in range(TRIES):
            row = await self._row(intention.source, intention.destination)
            body = legacy_body(intention) | ({"Meta": row["Meta"]} if row and row.get("Meta") else {})
            method, path = ("PUT", f"{LIST}/{row['ID']}") if row else ("POST", LIST)
            try:
                await self.consul.exchange(method, path, self._at, json.dumps(body), accept=(200,))
                return
            except ConsulError as error:
                # Between our read and our write somebody made it, or took it away: look again.
                if "duplicate intention" not in error.why and "non-existent intention" not in error.why:
                    raise
        raise _lost(intention.source, intention.destination)

    async def delete(self, source: str, destination: str) -> bool:
        row = await self._row(source, destination)
        if row is None:
            return False
        try:
            await self.consul.exchange("DELETE", f"{LIST}/{row['ID']}", self._at, accept=(200,))
        except ConsulError as error:
            if "non-existent intention" not in error.why:
                raise
            return False
        return True

    async def _row(self, source: str, destination: str) -> Mapping[str, Any] | None:
        rows: Iterable[Mapping[str, Any]] = (await self.consul.get(LIST, self._at)).body or ()
        found = (r for r in rows if (r["SourceName"], r["DestinationName"]) == (source, destination))
        return next(found, None)


class ConfigEntryDoor(IntentionsDoor):
    """Consul >= 1.9: one `service-intentions` config entry per destination holds all its sources."""

    async def put(self, intention: Intention) -> None:
        await self._edit(intention.destination, (Put(intention),), frozenset())

    async def delete(self, source: str, destination: str) -> bool:
        return await self._edit(destination, (), frozenset({source}))

    async def carry_out(self, todo: IntentionPlan) -> None:
        """One atomic write per destination, the exact ones first."""
        puts = {n: tuple(g) for n, g in groupby(todo.puts, key=lambda p: p.new.destination)}
        gone = {
            n: frozenset(i.source for i in g) for n, g in groupby(todo.deletes, key=lambda i: i.destination)
        }
        for name in sorted(puts.keys() | gone.keys(), reverse=True):  # "*" sorts before every name
            await self._edit(name, puts.get(name, ()), gone.get(name, frozenset()))

    async def _edit(self, name: str, puts: tuple[Put, ...], gone: frozenset[str]) -> bool:
        """Read, change, compare-and-set; again when another writer was faster. False: nothing to do."""
        for _ in range(TRIES):
            entry = await self._entry(name)
            refuse_foreign(IntentionPlan(puts=puts), _foreign_of(entry))
            own = {i.source: i for i in entry_intentions(entry)}
            want = {s: i for s, i in own.items() if s not in gone} | {p.new.source: p.new for p in puts}
            if want == own:
                return False
            if await self._write(name, entry, merged_entry(entry, name, tuple(want.values()))):
                return True
        raise _lost("*", name)

    async def _entry(self, name: str) -> Mapping[str, Any] | None:
        # The list, not the entry: a missing entry is then an empty list instead of a 404 in several shapes.
        entries: Iterable[Mapping[str, Any]] = (
            await self.consul.get(f"/v1/config/{KIND}", self._at)
        ).body or ()
        return next((e for e in entries if e["Name"] == name), None)

    async def _write(self, name: str, old: Mapping[str, Any] | None, new: Mapping[str, Any] | None) -> bool:
        """True when it went through. Old agents ignore `cas` on DELETE and answer {}; newer ones say true."""
        params = {**self._at, "cas": str(old["ModifyIndex"] if old else 0)}
        if new is None:
            path = f"/v1/config/{KIND}/{quote(name, safe='')}"
            raw = await self.consul.exchange("DELETE", path, params, accept=(200,))
        else:
            raw = await self.consul.exchange("PUT", "/v1/config", params, json.dumps(new), accept=(200,))
        return raw.text.strip() != "false"


async def open_intentions(consul: Consul, primary: str = "") -> IntentionsDoor:
    """The door that fits the agent's version. `primary` empty: taken from the agent's own configuration."""
    info = await consul.self_info()
    kind: Callable[[Consul, str], IntentionsDoor] = (
        ConfigEntryDoor if info.version_tuple >= CONFIG_ENTRIES_SINCE else LegacyDoor
    )
    return kind(consul, primary or info.primary_datacenter)


def refuse_foreign(todo: IntentionPlan, foreign: Iterable[Foreign]) -> None:
    """Raise Refused when the plan writes over a rule that says more than weir can express.

    A peer's rule is no obstacle: it stands beside ours, since its source is another identity.
    """
    taken = {(f.destination, f.source) for f in foreign if f.why == L7}
    for put in todo.puts:
        if pair(put.new) in taken:
            raise Refused(
                f"intention {put.new.source} -> {put.new.destination}",
                f"Consul holds {L7}; writing ours would throw that away",
                "remove that rule in Consul first, or take the row out of intentions/catalog.yaml",
            )


def _foreign_of(entry: Mapping[str, Any] | None) -> tuple[Foreign, ...]:
    if entry is None:
        return ()
    rows = (
        {**s, "SourceName": s["Name"], "DestinationName": entry["Name"]} for s in entry.get("Sources") or ()
    )
    return read_rows(rows)[1]


def _lost(source: str, destination: str) -> ConsulError:
    return ConsulError(
        409,
        f"intention {source} -> {destination}",
        f"other writers were faster {TRIES} times in a row",
        "find out who else writes intentions, then try again",
    )
