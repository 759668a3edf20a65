"""The control plane process of one region: everything is made, named and wired here, and here only.

Law: composition root. No decision; each loop is a few lines around one tick of what is tested alone.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import signal
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from mesh.catalog import load_services
from mesh.clock import Clock, SystemClock
from mesh.consul import keys
from mesh.consul.client import Consul
from mesh.consul.doors import open_intentions
from mesh.consul.errors import ConsulError
from mesh.consul.watch import Watch
from mesh.controlplane.carrier import Carrier
from mesh.controlplane.metrics import PlaneMetrics, Views
from mesh.controlplane.plane import Plane
from mesh.controlplane.prober import Prober
from mesh.controlplane.reporter import Reporter
from mesh.controlplane.sources import Seat, Sources
from mesh.controlplane.status import ProxyView, layout_of
from mesh.controlplane.web import Page
from mesh.fold import Facts, needed_leafs
from mesh.model import ProxyKind, as_json
from mesh.traffic.slots import Layout
from mesh.xds import names
from mesh.xds.auth import authenticator
from mesh.xds.lrs import LoadSample
from mesh.xds.server import AdsServer
from mesh.xds.state import fingerprint
from regions.cli.errors import UsageError
from regions.load import load_regions

log = logging.getLogger("weir.controlplane")

FAR_GRACE_S = 4.0
"""How long the first decision waits for other regions to answer or fail: without it a restart beside a slow
region would take that region's endpoints out of the Envoys for a moment."""
RETRY_S = 0.25


@dataclass(frozen=True, slots=True)
class Settings:
    """What `weir control-plane` is started with.

    http: host:port of the metrics page. source_address: what probes of other regions are sent from; "" leaves
    that to the kernel.
    """

    region: str
    consul: str
    regions_dir: Path
    services_dir: Path
    ads_socket: str
    http: str
    source_address: str = ""


class Process:
    """One control plane. `run` serves until `stop` is set."""

    def __init__(self, settings: Settings, consul: Consul, clock: Clock, rng: random.Random) -> None:
        regions, services = load_regions(settings.regions_dir), load_services(settings.services_dir)
        if settings.region not in regions.names:
            known = ", ".join(regions.names)
            raise UsageError(
                f"region {settings.region!r}", f"no file of it in {settings.regions_dir}", f"known: {known}"
            )
        self.settings, self.consul, self.clock, self.rng = settings, consul, clock, rng
        self.seat = Seat(settings.region, regions, services)
        registry = CollectorRegistry()
        self.metrics = PlaneMetrics(registry)
        self.plane = Plane(Facts(settings.region, regions, services), clock, self.metrics)
        self.server = AdsServer(
            settings.ads_socket,
            clock=clock,
            rng=rng,
            authenticate=authenticator(self.plane.proxies),
            metrics=registry,
        )
        self.prober = Prober(
            lambda: self.plane.inputs.facts, self.plane.down, clock, rng, settings.source_address
        )
        self.reporter = Reporter(consul, self.plane, clock, self._views, self._version, self.prober.words)
        self.page = Page(settings.http, registry, self._lacking, self._state)
        self.carrier = Carrier(consul, self.plane, self._watches, clock, rng)
        self.sources: Sources | None = None
        self.served = False

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop`. Streams are closed on the way out; Envoys keep what they have."""
        self.server.on_change = self.reporter.note
        self.server.on_load = self._on_load
        self.metrics.registry.register(self._gauges())
        await self.page.start()
        await self.server.start()
        try:
            async with asyncio.TaskGroup() as group:
                loops = [group.create_task(loop, name=name) for name, loop in self._loops().items()]
                await stop.wait()
                for task in loops:
                    task.cancel()
        finally:
            await self.server.stop()
            await self.page.stop()

    def _loops(self) -> dict[str, Coroutine[Any, Any, None]]:
        return {
            "watches": self._watch(),
            "ticks": self._ticks(),
            "carry": self.carrier.run(),
            "status": self.reporter.run(),
            "paths": self.prober.run(),
        }

    async def _watch(self) -> None:
        door = await self._until(
            partial(open_intentions, self.consul, self.seat.regions.primary.name), "its version"
        )
        self.plane.layouts(await self._until(self._layouts, "the last layouts"))
        self.sources = Sources(self.consul, door, self.plane, self.seat, clock=self.clock, rng=self.rng)
        await self.sources.run()

    async def _until(self, ask: Callable[[], Coroutine[Any, Any, Any]], what: str) -> Any:
        """Ask Consul until it answers; a control plane may well be up before its agent."""
        while True:
            try:
                return await ask()
            except ConsulError as error:
                log.info("waiting for Consul to tell %s: %s", what, error.why)
                await self.clock.sleep(RETRY_S * (1 + self.rng.random()))

    async def _layouts(self) -> dict[str, Layout]:
        """What the control plane before us had in force, from its status documents."""
        out: dict[str, Layout] = {}
        for spec in self.seat.services:
            entry = await self.consul.kv_get(keys.status(spec.name, self.settings.region))
            out[spec.name] = layout_of(_json(entry.value)) if entry else ()
        return out

    async def _ticks(self) -> None:
        await self._far_regions()
        wake = self.plane.wakes
        while True:
            try:
                async with asyncio.timeout(1.0):  # an emptied set is looked at again though nothing is new
                    await wake.tick.wait()
            except TimeoutError:
                if not self.plane.inputs.facts.emptied:
                    continue
            wake.tick.clear()
            self._tick()

    def _tick(self) -> None:
        before = set(self.plane.sets)
        sets = self.plane.tick()
        for service in needed_leafs(self.plane.inputs.facts):
            if self.sources is not None:
                self.sources.want_leaf(service)
        if sets is None:
            return
        self.server.publish(sets)
        self.server.forget(before - set(sets))
        if not self.served:
            log.info("first snapshot served: %d proxies", len(sets))
        self.served = True
        self.reporter.note()

    async def _far_regions(self) -> None:
        """Let other regions be heard before the first decision, but not for ever."""
        deadline = self.clock.monotonic() + FAR_GRACE_S
        far = [r for r in self.seat.regions.names if r != self.settings.region]
        wanted = [f"endpoints/{s.name}/{r}" for s in self.seat.services for r in far] + [
            f"gateways/{r}" for r in far
        ]
        while self.sources is None or self.plane.inputs.facts.proxies is None:
            self._tick()  # asks for the leafs meanwhile
            await self.clock.sleep(0.02)
        while not all(map(self.sources.tried, wanted)) and self.clock.monotonic() < deadline:
            await self.clock.sleep(0.02)

    # -- views --------------------------------------------------------------------------------------------

    def _version(self) -> str:
        """Fingerprint of the routes that every ingress of this region should have (they are all alike)."""
        proxies = self.plane.proxies()  # newer than the sets: a proxy may have left since the last tick
        for proxy_id, made in self.plane.sets.items():
            if proxy_id in proxies and proxies[proxy_id].kind is ProxyKind.INGRESS:
                return fingerprint(made.of(names.ROUTE)) or ""
        return ""

    def _views(self) -> Sequence[ProxyView]:
        out = []
        proxies = self.plane.proxies()
        for proxy_id, streams in self.server.proxies().items():
            if proxy_id not in proxies or proxies[proxy_id].kind is not ProxyKind.INGRESS:
                continue
            for stream in streams:
                routes = stream.types.get(names.ROUTE)
                out.append(ProxyView(proxy_id, (routes.acked if routes else None) or "", stream.alarm or ""))
        return out

    def _on_load(self, _proxy: str, samples: Iterable[LoadSample]) -> None:
        by_service: dict[str, dict[tuple[str, str], int]] = {}
        seconds: dict[str, float] = {}
        for sample in samples:
            seconds[sample.service] = max(sample.seconds, seconds.get(sample.service, 0.0))
            owners = by_service.setdefault(sample.service, {})
            owner = (sample.region, sample.stage)
            owners[owner] = owners.get(owner, 0) + sample.requests
        for service, requests in by_service.items():
            self.reporter.load(service, requests, seconds[service])

    def _watches(self) -> Mapping[str, Watch[Any]]:
        return self.sources.watches if self.sources else {}

    def _lacking(self) -> str:
        return "" if self.served else "waiting for " + ", ".join(self.plane.lacking)

    def _state(self) -> dict[str, Any]:
        """For people and tests; certificates and keys are left out."""
        now = self.clock.monotonic()
        return {
            "region": self.settings.region,
            "lacking": list(self.plane.lacking),
            "error": self.plane.error,
            "plans": as_json(self.plane.decision.plans) if self.plane.decision else {},
            "path": dict(self.prober.words()),
            "watches": {
                n: {"index": w.index, "age_s": w.age_s(now), "error": w.error, "changes": w.changes}
                for n, w in sorted(self._watches().items())
            },
            "proxies": {p: [as_json(s) for s in streams] for p, streams in self.server.proxies().items()},
        }

    def _gauges(self) -> Views:
        def ages() -> Iterable[tuple[tuple[str, ...], float]]:
            now = self.clock.monotonic()
            for name, watch in self._watches().items():
                age = watch.age_s(now)
                yield (name,), age if age is not None else float("inf")

        def refusals() -> Iterable[tuple[tuple[str, ...], float]]:
            plans = self.plane.decision.plans if self.plane.decision else {}
            for service, plan in plans.items():
                yield (service,), float(len(plan.refusals))

        def weights() -> Iterable[tuple[tuple[str, ...], float]]:
            for service, plan in (self.plane.decision.plans if self.plane.decision else {}).items():
                totals: dict[tuple[str, str], int] = {}
                for piece in plan.slices:
                    owner = (piece.region, piece.stage)
                    totals[owner] = totals.get(owner, 0) + piece.weight
                for (region, stage), weight in totals.items():
                    yield (service, region, stage), weight / 10_000

        def paths() -> Iterable[tuple[tuple[str, ...], float]]:
            return [((region,), float(state.up)) for region, state in self.prober.states.items()]

        return Views(
            {
                "weir_watch_age_seconds": ("Since Consul last answered this watch", ("watch",), ages),
                "weir_kv_refused": ("KV values that are not in force", ("service",), refusals),
                "weir_traffic_share": ("Intended share", ("service", "region", "stage"), weights),
                "weir_path_up": ("Whether the way to a region answers", ("region",), paths),
            }
        )


def _json(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError:
        return None


async def serve(settings: Settings, environ: Mapping[str, str]) -> None:
    """Run until SIGTERM or SIGINT."""
    clock, rng = SystemClock(), random.Random()  # noqa: S311 - jitter, not secrets
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with Consul.from_env(environ, address=settings.consul, clock=clock, rng=rng) as consul:
        await Process(settings, consul, clock, rng).run(stop)
