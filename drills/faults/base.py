"""What every fault is: prepare, inject, heal, proof.

Law: `prepare` changes nothing. `heal` is unconditional and idempotent: it may be called without an
inject, twice, or by another process that only knows the FaultSpec. `proof` measures; it never believes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

from drills.doors import Doors


@dataclass(frozen=True, slots=True)
class FaultSpec:
    """All that is needed to inject a fault, or to heal it after a crash of the one who injected it.

    do: row of drills.faults.table.TABLE. target: region. drill: id of the drill (names packet chains).
    params: from the scenario, plus what `prepare` found out (a former value to put back, say).
    """

    do: str
    target: str
    service: str
    drill: str
    params: Mapping[str, str | float] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class Proof:
    """Whether nothing of the fault is left, and what was measured to know it."""

    healed: bool
    detail: str


class Fault(Protocol):
    @property
    def spec(self) -> FaultSpec: ...

    @property
    def by_hand(self) -> str:
        """What a person would do to undo it, as commands."""

    async def prepare(self) -> FaultSpec:
        """The spec with what healing will need. Raises Refused when this can't be done here."""

    async def inject(self) -> str:
        """Break it; returns what was done, in words. May raise: healing comes all the same."""

    async def heal(self) -> str:
        """Undo it; returns what was done, in words."""

    async def proof(self) -> Proof: ...


Factory = Callable[[FaultSpec, Doors], Fault]
