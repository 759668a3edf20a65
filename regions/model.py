"""Regions as frozen rows.

Law: pure. No I/O, no clock. A RegionSet that exists is consistent: every failover name is known,
exactly one region is the primary datacenter, no name appears twice.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Cloud(StrEnum):
    """Where a region's machines come from. LOCAL means loopback addresses on this machine."""

    AWS = "aws"
    AZURE = "azure"
    LOCAL = "local"


@dataclass(frozen=True, slots=True)
class Gateways:
    """Public addresses of a region, `host:port`. Empty means: not known before it is applied."""

    ingress: str = ""
    mesh: str = ""


@dataclass(frozen=True, slots=True)
class Region:
    """One region. Its name is also the name of its Consul datacenter.

    weight: share of the traffic relative to the other regions when KV says nothing (>= 0).
    failover: names of the regions that take over, first choice first.
    network: regions with the same non-empty network reach each other's instances directly;
        otherwise traffic goes through the mesh gateway of the other region.
    """

    name: str
    cloud: Cloud
    zones: tuple[str, ...]
    failover: tuple[str, ...]
    weight: float
    gateways: Gateways = field(default_factory=Gateways)
    primary: bool = False
    network: str = ""


class RegionSetError(ValueError):
    """The rows contradict one another; the message names the region, the field and the reason."""


@dataclass(frozen=True, slots=True)
class RegionSet:
    """All regions of a mesh, sorted by name. Raises RegionSetError when the rows don't fit together."""

    regions: tuple[Region, ...]

    def __post_init__(self) -> None:
        names = [r.name for r in self.regions]
        if names != sorted(names):
            object.__setattr__(self, "regions", tuple(sorted(self.regions, key=lambda r: r.name)))
        if len(set(names)) != len(names):
            raise RegionSetError(f"regions: a name appears twice in {sorted(names)}")
        primaries = [r.name for r in self.regions if r.primary]
        if len(primaries) != 1:
            raise RegionSetError(f"regions: exactly one region must have primary: true, found {primaries}")
        for region in self.regions:
            self._check_failover(region, set(names))
        if sum(r.weight for r in self.regions) <= 0:
            raise RegionSetError("regions: the weights of all regions are zero")

    @staticmethod
    def _check_failover(region: Region, names: set[str]) -> None:
        for other in region.failover:
            if other == region.name:
                raise RegionSetError(f"region {region.name}: failover names the region itself")
            if other not in names:
                raise RegionSetError(f"region {region.name}: failover names unknown region {other!r}")
        if len(set(region.failover)) != len(region.failover):
            raise RegionSetError(f"region {region.name}: failover names a region twice")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(r.name for r in self.regions)

    @property
    def primary(self) -> Region:
        return next(r for r in self.regions if r.primary)

    def get(self, name: str) -> Region | None:
        return next((r for r in self.regions if r.name == name), None)

    def only(self, names: tuple[str, ...]) -> RegionSet:
        """The same mesh with these regions alone; failover lists are cut to what is left.

        If the primary is not among them, the first one named takes its place.
        """
        from dataclasses import replace

        kept = [r for r in self.regions if r.name in names]
        if len(kept) != len(set(names)):
            unknown = sorted(set(names) - {r.name for r in kept})
            raise RegionSetError(f"regions: unknown {unknown}; known are {list(self.names)}")
        primary = self.primary.name if self.primary.name in names else names[0]
        return RegionSet(
            tuple(
                replace(r, primary=r.name == primary, failover=tuple(f for f in r.failover if f in names))
                for r in kept
            )
        )
