"""The small doors a drill reaches the world through; drills.live has the real ones, tests have fakes.

Law: protocols and the values that pass through them, nothing else. No method here judges anything.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from drills.history import Request
from drills.model import Load
from mesh.clock import Clock


@dataclass(frozen=True, slots=True)
class ProcessSeen:
    """One process of a region as its supervisor tells it. ready: its own probe passes."""

    pid: int | None
    state: str
    ready: bool
    restarts: int = 0


class Regions(Protocol):
    """Whole regions: their processes as the kernel knows them, and bringing one up again."""

    def pids(self, region: str) -> tuple[int, ...]:
        """Every living process of the region, the supervisor first (the one that restarts the others)."""

    def signal(self, pids: Sequence[int], sign: signal.Signals) -> None:
        """Send it to each; one that is gone already is fine."""

    def frozen(self, region: str) -> tuple[int, ...]:
        """Processes of the region that are stopped (SIGSTOP)."""

    async def up(self, region: str) -> None:
        """Start the region if it isn't running; returns when it was started. Raises WeirError."""

    async def not_ready(self, region: str) -> str:
        """ "" when all of the region's processes are ready and its instances healthy, else why not."""


class Processes(Protocol):
    """One process of one region, by its supervisor."""

    async def status(self, region: str) -> Mapping[str, ProcessSeen]:
        """By process name. Raises WeirError when the supervisor can't be asked."""

    async def hold(self, region: str, process: str) -> None:
        """SIGKILL it and keep it down."""

    async def release(self, region: str, process: str) -> None:
        """Let it start again; harmless if it was not held."""


class Packets(Protocol):
    """The packet filter of this machine."""

    async def check(self) -> str:
        """ "" when rules can be set here, else why not."""

    async def run(self, *args: str) -> str:
        """One iptables command; its output. Raises WeirError when it says no."""

    def subnet(self, region: str) -> str:
        """The region's /24, as `127.20.1.0/24`."""


class Orders(Protocol):
    """What a person could order: evacuations through the traffic manager, plain keys in Consul."""

    async def evacuate(self, service: str, region: str, why: str) -> None: ...

    async def restore(self, service: str, region: str, why: str) -> None: ...

    async def read_key(self, region: str, key: str) -> bytes | None:
        """The value in the region's own KV, None when the key isn't there."""

    async def write_key(self, region: str, key: str, value: bytes | None) -> None:
        """Put, or delete with None. Plain Consul KV, as `consul kv put` does it."""


class Statuses(Protocol):
    """What the control planes publish, and what Envoy counts."""

    async def documents(self, service: str) -> Mapping[str, Mapping[str, Any]]:
        """status/traffic/<service>/<region> by region; a region that can't be asked is left out."""

    async def retries(self, service: str) -> int | None:
        """Sum of upstream_rq_retry over the living ingress gateways, None when none could be asked."""


class Generator(Protocol):
    """The load: in a process of its own, so that it neither disturbs nor is disturbed."""

    async def start(self, load: Load, service: str, ingresses: Sequence[str]) -> None: ...

    async def take(self) -> Sequence[Request]:
        """Requests that ended since the last call, in order of their end."""

    async def stop(self) -> Sequence[Request]:
        """Send no more, wait for what is under way (bounded), return the rest. Harmless when not started."""


@dataclass(frozen=True, slots=True)
class Doors:
    """All doors of one world, and its clock."""

    regions: Regions
    processes: Processes
    packets: Packets
    orders: Orders
    statuses: Statuses
    clock: Clock
    names: tuple[str, ...]
    """Regions of the world, sorted."""
