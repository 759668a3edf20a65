"""The table of faults: every name a scenario may use, what it does, who does it.

Law: rows only. `build` is the one way from a name to a Fault.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from drills.doors import Doors
from drills.faults.base import Factory, Fault, FaultSpec
from drills.faults.network import CutOffRegion
from drills.faults.process import EXECUTOR, FreezeProcess, HoldProcess
from drills.faults.region import FreezeRegion, KillRegion
from drills.faults.traffic import ChangeCanary, Evacuate
from mesh.world.plan import CONSUL, CONTROL_PLANE, MESH_GATEWAY
from regions.cli.errors import UsageError


@dataclass(frozen=True, slots=True)
class Row:
    """help: what it does. params: defaults that a scenario may override."""

    make: Factory
    help: str
    params: Mapping[str, str | float] = field(default_factory=lambda: MappingProxyType({}))


TABLE: Mapping[str, Row] = {
    "kill-region": Row(KillRegion, "SIGKILL to every process of the region"),
    "freeze-region": Row(FreezeRegion, "SIGSTOP to every process of the region"),
    "cut-off-region": Row(CutOffRegion, "drop all packets between the region and the others"),
    "hold-control-plane": Row(
        HoldProcess, "kill the control plane, keep it down", {"process": CONTROL_PLANE}
    ),
    "freeze-control-plane": Row(FreezeProcess, "SIGSTOP the control plane", {"process": CONTROL_PLANE}),
    "hold-consul": Row(HoldProcess, "kill the Consul server, keep it down", {"process": CONSUL}),
    "hold-mesh-gateway": Row(HoldProcess, "kill the mesh gateway, keep it down", {"process": MESH_GATEWAY}),
    "hold-executor": Row(HoldProcess, "kill an executor, keep it down", {"process": EXECUTOR}),
    "freeze-executor": Row(FreezeProcess, "SIGSTOP an executor", {"process": EXECUTOR}),
    "evacuate": Row(Evacuate, "evacuate the region through the traffic manager"),
    "change-canary": Row(ChangeCanary, "change the canary weight by a plain KV put", {"by": 0.05}),
}


def build(spec: FaultSpec, doors: Doors) -> Fault:
    """The fault of a spec. Raises UsageError for a name that is no row."""
    row = TABLE.get(spec.do)
    if row is None:
        raise UsageError(f"fault {spec.do!r}", "there is none of that name", f"known are {', '.join(TABLE)}")
    return row.make(replace(spec, params={**row.params, **spec.params}), doors)
