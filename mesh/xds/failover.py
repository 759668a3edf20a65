"""Who stands in for whom: the priorities behind one (region, stage).

Law: pure. The order is Envoy's to follow with nothing but Envoy alive, so it holds also while this control
plane is down. A stage is never replaced by a canary, a model never by another: every stand-in is `stable`.
"""

from __future__ import annotations

from dataclasses import dataclass

from mesh.model import STABLE
from regions.model import RegionSet


@dataclass(frozen=True, slots=True, order=True)
class Hop:
    """One priority of a cluster: the instances of (region, stage).

    direct: their sidecars are reached as they are; else through the mesh gateway of their region.
    """

    region: str
    stage: str
    direct: bool

    @property
    def label(self) -> str:
        """What endpoint metadata and the cluster's TLS settings are matched by."""
        return f"{self.stage}.{self.region}"


def direct(regions: RegionSet, here: str, there: str) -> bool:
    """Whether `here` reaches the instances of `there` without a mesh gateway."""
    if here == there:
        return True
    mine, theirs = regions.get(here), regions.get(there)
    return mine is not None and theirs is not None and mine.network != "" and mine.network == theirs.network


def hops(regions: RegionSet, here: str, region: str, stage: str) -> tuple[Hop, ...]:
    """Priorities of the cluster (region, stage) as seen from `here`, first choice first.

    The stage itself, then stable of the same region, then stable of that region's failover regions in order.
    """
    row = regions.get(region)
    order = [(region, stage), (region, STABLE), *((other, STABLE) for other in (row.failover if row else ()))]
    return tuple(Hop(r, s, direct(regions, here, r)) for r, s in dict.fromkeys(order))
