"""Orders, not breakages: a region evacuated, the canary weight changed. They are undone like faults.

Law: done by the same doors a person uses (traffic manager, plain KV). What another person changes
meanwhile is theirs: healing puts back only what is still ours, and says so otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from drills.doors import Doors
from drills.faults.base import FaultSpec, Proof
from regions.cli.errors import Refused

ABSENT = ""
"""Stands in a spec for "the key was not there" (no valid weight is an empty text)."""


async def _document(spec: FaultSpec, doors: Doors) -> Mapping[str, Any]:
    """The target's status, or another region's while the target's is not there (all say the same)."""
    documents = await doors.statuses.documents(spec.service)
    found = documents.get(spec.target) or next(iter(documents.values()), None)
    if found is None:
        raise Refused(
            f"status of {spec.service}",
            "no control plane publishes one",
            "see `weir status`",
        )
    return found


class Evacuate:
    def __init__(self, spec: FaultSpec, doors: Doors) -> None:
        self.spec, self._doors = spec, doors

    @property
    def by_hand(self) -> str:
        return f"weir traffic restore {self.spec.target} --service {self.spec.service}"

    async def prepare(self) -> FaultSpec:
        found = await _document(self.spec, self._doors)
        if self.spec.target in (found.get("evacuated") or ()):
            raise Refused(f"region {self.spec.target}", "it is evacuated already", f"first: {self.by_hand}")
        return self.spec

    async def inject(self) -> str:
        await self._doors.orders.evacuate(self.spec.service, self.spec.target, f"drill {self.spec.drill}")
        return f"{self.spec.target} ordered to be evacuated"

    async def heal(self) -> str:
        await self._doors.orders.restore(
            self.spec.service, self.spec.target, f"drill {self.spec.drill} is over"
        )
        return f"{self.spec.target} ordered to be restored"

    async def proof(self) -> Proof:
        documents = await self._doors.statuses.documents(self.spec.service)
        for region in self._doors.names:
            document = documents.get(region)
            if document is None:
                return Proof(False, f"{region} publishes no status")
            takes = any(row[0] == self.spec.target for row in document.get("slices") or ())
            if self.spec.target in (document.get("evacuated") or ()) or not takes:
                return Proof(False, f"the plan of {region} gives {self.spec.target} no traffic yet")
            if not document.get("applied"):
                return Proof(False, f"the plan of {region} is not applied yet")
        return Proof(True, f"every region's applied plan gives {self.spec.target} traffic")


class ChangeCanary:
    """The canary weight moved `by` (or away from the edge of [0, 1] if that would leave it)."""

    def __init__(self, spec: FaultSpec, doors: Doors) -> None:
        self.spec, self._doors = spec, doors

    @property
    def by_hand(self) -> str:
        key, before = (
            self.spec.params.get("key", "config/traffic/canary-weight"),
            self.spec.params.get("before"),
        )
        return f"consul kv delete {key}" if before in (None, ABSENT) else f"consul kv put {key} {before}"

    async def prepare(self) -> FaultSpec:
        weight = (await _document(self.spec, self._doors)).get("canary_weight") or {}
        value, key, by = float(weight["value"]), str(weight["key"]), float(self.spec.params.get("by", 0.05))
        after = value + by if value + by <= 1.0 else value - by
        before = await self._doors.orders.read_key(self.spec.target, key)
        known = {"key": key, "before": ABSENT if before is None else before.decode(), "after": f"{after:.4f}"}
        self.spec = replace(self.spec, params={**self.spec.params, **known})
        return self.spec

    async def inject(self) -> str:
        key, after = str(self.spec.params["key"]), str(self.spec.params["after"])
        await self._doors.orders.write_key(self.spec.target, key, after.encode())
        return f"{key} put to {after} in {self.spec.target}"

    async def heal(self) -> str:
        key, before = str(self.spec.params["key"]), str(self.spec.params["before"])
        now = await self._doors.orders.read_key(self.spec.target, key)
        if now is None or now.decode() != self.spec.params["after"]:
            return f"{key} is no longer as the drill left it and stays as it is"
        await self._doors.orders.write_key(
            self.spec.target, key, None if before == ABSENT else before.encode()
        )
        return f"{key} put back to {before or 'absent'} in {self.spec.target}"

    async def proof(self) -> Proof:
        key, after = str(self.spec.params["key"]), float(self.spec.params["after"])
        for region, document in (await self._doors.statuses.documents(self.spec.service)).items():
            value = (document.get("canary_weight") or {}).get("value")
            if value == after or not document.get("applied"):
                return Proof(False, f"{region} still has the drill's canary weight or is not applied")
        return Proof(True, f"no region has the drill's value of {key}")
