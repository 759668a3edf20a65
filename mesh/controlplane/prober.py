"""Knock at every other region's mesh gateway and keep a verdict for each.

Law: the loop and its state; the handshake is in probe.py, the verdict in path.py.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random

from mesh.clock import Clock
from mesh.controlplane import path, probe
from mesh.controlplane.path import PathState
from mesh.controlplane.probe import Target
from mesh.fold import Facts
from mesh.model import Leaf, Roots
from mesh.xds import names

log = logging.getLogger("weir.prober")
INTERVAL_S = 0.5


def targets(facts: Facts) -> tuple[Target, ...]:
    """One target per other region with a gateway and something healthy behind it.

    A region without a healthy instance is not probed: its endpoints already say that it serves nobody.
    """
    out = []
    for region in facts.regions.regions:
        if region.name == facts.region or facts.roots is None:
            continue
        gates = sorted(facts.gateways.get(region.name, ()))
        ends = [
            e
            for (_, r), all_ends in facts.endpoints.items()
            if r == region.name
            for e in all_ends
            if e.health in ("passing", "warning")
        ]
        if gates and ends:
            end = min(ends)
            sni = names.sni(end.service, end.stage, end.region, facts.roots.trust_domain)
            out.append(Target(region.name, gates[0].address, gates[0].port, sni))
    return tuple(out)


class Prober:
    """states: verdict by region. `changed` hears which regions are down when that changes."""

    def __init__(
        self,
        facts: Callable[[], Facts],
        changed: Callable[[frozenset[str]], None],
        clock: Clock,
        rng: Random,
        source: str = "",
    ) -> None:
        self.states: dict[str, PathState] = {}
        self._facts, self._changed, self._clock, self._rng = facts, changed, clock, rng
        self._source = source
        self._tls: tuple[Roots, Leaf, ssl.SSLContext] | None = None

    async def run(self) -> None:
        """Until cancelled: one round about every INTERVAL_S, jittered so that regions don't knock in step."""
        while True:
            await self.round()
            await self._clock.sleep(INTERVAL_S * (0.9 + 0.2 * self._rng.random()))

    async def round(self) -> None:
        """Probe all targets at once and take the results in."""
        facts = self._facts()
        tls = self._context(facts)
        if tls is None:
            return
        wanted = targets(facts)
        results = await asyncio.gather(*(probe.knock(t, tls, self._source) for t in wanted))
        before = self.down()
        for target, reason in zip(wanted, results, strict=True):
            old = self.states.get(target.region, PathState())
            new = path.step(old, not reason, self._clock.monotonic(), reason)
            if not new.known:
                # A region that never answered is not "lost": it may not be up yet, and its endpoints say so.
                new = replace(new, up=True, run=0, flaps=0)
            self.states[target.region] = new
            if new.up != old.up:
                log.warning("path to %s is %s %s", target.region, "up" if new.up else "down", new.reason)
        if self.down() != before:
            self._changed(self.down())

    def down(self) -> frozenset[str]:
        return frozenset(r for r, s in self.states.items() if not s.up)

    def words(self) -> Mapping[str, str]:
        return {r: _word(s) for r, s in sorted(self.states.items())}

    def _context(self, facts: Facts) -> ssl.SSLContext | None:
        """A TLS context of the present leaf, made anew when a certificate rotates."""
        leaf = next((facts.leafs[s] for s in sorted(facts.leafs, key=lambda s: s != "ingress-gateway")), None)
        if facts.roots is None or leaf is None:
            return None
        if self._tls is None or self._tls[:2] != (facts.roots, leaf):
            self._tls = (facts.roots, leaf, probe.context(facts.roots, leaf))
        return self._tls[2]


def _word(state: PathState) -> str:
    if not state.known:
        return "unknown"
    return "up" if state.up else "down"
