"""A region cut off from the others by packet rules, while clients still reach everybody.

Law: rules stand in one chain of our own, named after the drill, hooked into OUTPUT (loopback packets
all pass it). Healing removes the hook and the chain and then reads the rules back to prove it.
"""

from __future__ import annotations

from drills.doors import Doors
from drills.faults.base import FaultSpec, Proof
from regions.cli.errors import Refused

CHAIN_PREFIX = "WEIR-"
MESH_GATEWAY_PORT, RPC_PORT, WAN_PORT = "8443", "8300", "8302"
UNBOUND = "127.0.0.1"
"""Source of connections that a process made without binding to its own address."""


def chain_name(drill: str) -> str:
    """At most 28 characters are allowed; what follows the last dash of a drill's id is unique."""
    return CHAIN_PREFIX + drill.rpartition("-")[2][:20]


def rules(target: str, others: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """The rules as iptables words, without `-A CHAIN`. Subnets are /24, as `127.20.1.0/24`.

    Both directions are dropped by subnet. Some connections carry no region in their source (Consul's
    gossip over TCP, probes of control planes); those are dropped by where they go: the target's mesh
    gateway and Consul ports, and TCP gossip everywhere (the survivors keep theirs over UDP).
    """
    base = target.rsplit(".", 1)[0]
    made: list[tuple[str, ...]] = []
    for other in others:
        made.append(("-s", target, "-d", other, "-j", "DROP"))
        made.append(("-s", other, "-d", target, "-j", "DROP"))
    tcp = ("-p", "tcp", "--dport")
    made.append(("-s", UNBOUND, "-d", f"{base}.4", *tcp, MESH_GATEWAY_PORT, "-j", "DROP"))
    made.append(("-s", UNBOUND, "-d", f"{base}.1", *tcp, RPC_PORT, "-j", "DROP"))
    for subnet in (target, *others):
        host = subnet.rsplit(".", 1)[0] + ".1"
        made.append(("-s", UNBOUND, "-d", host, *tcp, WAN_PORT, "-j", "DROP"))
    return tuple(made)


class CutOffRegion:
    def __init__(self, spec: FaultSpec, doors: Doors) -> None:
        self.spec, self._doors = spec, doors
        self.chain = chain_name(spec.drill)

    @property
    def by_hand(self) -> str:
        c = self.chain
        return f"iptables-legacy -D OUTPUT -j {c}; iptables-legacy -F {c}; iptables-legacy -X {c}"

    async def prepare(self) -> FaultSpec:
        why = await self._doors.packets.check()
        if why:
            raise Refused(
                "drill mode cut-off",
                why,
                "run as root with legacy iptables (`make setup` brings it), or use --set mode=freeze",
            )
        if len(self._doors.names) < 2:
            raise Refused("drill mode cut-off", "there is only one region", "start more with `weir up`")
        return self.spec

    async def inject(self) -> str:
        packets = self._doors.packets
        others = tuple(packets.subnet(n) for n in self._doors.names if n != self.spec.target)
        await packets.run("-N", self.chain)
        made = rules(packets.subnet(self.spec.target), others)
        for rule in made:
            await packets.run("-A", self.chain, *rule)
        # Hooked last: the region is cut in one moment, not rule by rule.
        await packets.run("-I", "OUTPUT", "-j", self.chain)
        return f"{len(made)} packet rules in chain {self.chain} cut {self.spec.target} off"

    async def heal(self) -> str:
        packets = self._doors.packets
        listing = (await packets.run("-S")).splitlines()
        hook = f"-A OUTPUT -j {self.chain}"
        for _ in range(listing.count(hook)):
            await packets.run("-D", "OUTPUT", "-j", self.chain)
        if f"-N {self.chain}" in listing:
            await packets.run("-F", self.chain)
            await packets.run("-X", self.chain)
        return f"chain {self.chain} removed"

    async def proof(self) -> Proof:
        left = [line for line in (await self._doors.packets.run("-S")).splitlines() if self.chain in line]
        if left:
            return Proof(False, f"packet rules are left: {left[0]}")
        why = await self._doors.regions.not_ready(self.spec.target)
        return Proof(not why, why or f"no rule of chain {self.chain} is left, {self.spec.target} is ready")
