"""All watches of a control plane: few and wide (hashicorp/consul#7527: 200 connections per client).

Law: reads Consul and hands frozen values to a Sink; decides nothing and keeps nothing but what is needed to
put one answer together from several watches.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol

from intentions.model import Intention
from mesh.clock import Clock
from mesh.consul import decode, keys, watch
from mesh.consul.answers import KvPage
from mesh.consul.client import Consul
from mesh.consul.doors import IntentionsDoor
from mesh.consul.watch import Watch
from mesh.controlplane.two_copies import TwoCopies
from mesh.fold import EndpointsSeen, Event, GatewaysSeen, IntentionsSeen, LeafSeen, ProxiesSeen, RootsSeen
from mesh.model import Proxy, ServiceSpec
from mesh.traffic.epochs import Record
from mesh.traffic.plan import ConfigPage, Value
from regions.model import RegionSet

log = logging.getLogger("weir.sources")
GATEWAY_SERVICES = ("ingress-gateway", "mesh-gateway")


class Sink(Protocol):
    """Who hears of news. Called in the loop's thread."""

    def fact(self, event: Event) -> None: ...
    def page(self, page: ConfigPage) -> None: ...
    def records(self, region: str, records: dict[str, Record]) -> None: ...


def config_page(page: KvPage) -> ConfigPage:
    """KV page of config/traffic/ without folder keys (the UI makes such for every folder)."""
    values = {e.key: Value(e.value, e.modify_index) for e in page.entries if not e.key.endswith("/")}
    marker = any(e.key == keys.CONFIG for e in page.entries)
    return ConfigPage(values, marker, page.index)


def epoch_records(page: KvPage) -> dict[str, Record]:
    """Records by config key; what is no record is passed over (and logged)."""
    out = {}
    for entry in page.entries:
        record = Record.decode(entry.value, entry.modify_index)
        if record is None:
            log.warning("%s is not an epoch record; passed over", entry.key)
        else:
            out[keys.config_of_epoch(entry.key)] = record
    return out


@dataclass(frozen=True, slots=True)
class Seat:
    """From where the mesh is seen: the own region, all regions, the services to serve."""

    here: str
    regions: RegionSet
    services: tuple[ServiceSpec, ...]


class Sources:
    """Makes and runs the watches. `watches` is for the metrics page: age and error of each."""

    def __init__(
        self,
        consul: Consul,
        door: IntentionsDoor,
        sink: Sink,
        seat: Seat,
        *,
        clock: Clock,
        rng: Random,
    ) -> None:
        self.consul, self.sink = consul, sink
        self.here, self.regions, self.services = seat.here, seat.regions, seat.services
        self.watches: dict[str, Watch[Any]] = {}
        self._door, self._clock, self._rng = door, clock, rng
        self._proxies: dict[str, tuple[Proxy, ...]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    async def run(self) -> None:
        """Run every watch until cancelled; leaf watches are added by `want_leaf`."""
        self._kv()
        self._catalog()
        self._intentions()
        self._watch("roots", self.consul.roots, lambda v, _: self.sink.fact(RootsSeen(v)))
        try:
            await asyncio.Event().wait()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def want_leaf(self, service: str) -> None:
        """Start watching the leaf of a service unless that is done already."""

        async def fetch(index: int, wait_s: float) -> tuple[int, Any]:
            return await self.consul.leaf(service, index, wait_s)

        if f"leaf/{service}" not in self.watches:
            self._watch(f"leaf/{service}", fetch, lambda v, _: self.sink.fact(LeafSeen(v)))

    def tried(self, name: str) -> bool:
        """Whether the watch has answered or failed at least once."""
        found = self.watches.get(name)
        return found is not None and (found.wakeups > 0 or found.error is not None)

    def _kv(self) -> None:
        async def page(index: int, wait_s: float) -> tuple[int, ConfigPage]:
            found = config_page(await self.consul.kv_list(keys.CONFIG, None, index, wait_s))
            return found.index, found

        self._watch("config", page, lambda v, _: self.sink.page(v))
        for region in self.regions.names:
            self._watch(f"epochs/{region}", self._epochs_of(region), self._records_to(region), region)

    def _epochs_of(self, region: str) -> Callable[[int, float], Awaitable[tuple[int, dict[str, Record]]]]:
        async def fetch(index: int, wait_s: float) -> tuple[int, dict[str, Record]]:
            dc = None if region == self.here else region
            page = await self.consul.kv_list(keys.EPOCHS, dc, index, wait_s)
            return page.index, epoch_records(page)

        return fetch

    def _records_to(self, region: str) -> Callable[[dict[str, Record], int], None]:
        return lambda records, _: self.sink.records(region, records)

    def _catalog(self) -> None:
        for region in self.regions.names:
            for spec in self.services:
                self._endpoints(spec.name, region)
            if region != self.here:
                self._gateways(region)
        for service in (*GATEWAY_SERVICES, *(f"{s.name}{decode.SIDECAR_SUFFIX}" for s in self.services)):
            self._proxies_of(service)

    def _intentions(self) -> None:
        primary = self.regions.primary.name
        original = f"intentions/{primary}"
        both: TwoCopies[tuple[Intention, ...]] = TwoCopies(
            lambda value: self.sink.fact(IntentionsSeen(value)), lambda: self.watches[original].error is None
        )
        if primary != self.here:
            self._watch(original, self._door.watch_primary, lambda v, _: both.original(v), primary)
        self._watch("intentions", self._door.watch_fetch, lambda v, _: both.copy(v))

    def _endpoints(self, service: str, region: str) -> None:
        def decoded(body: Any) -> Any:
            return decode.endpoints(body, service, region)

        def news(value: Any, _: int) -> None:
            self.sink.fact(EndpointsSeen(service, region, value))

        self._health(f"endpoints/{service}/{region}", f"/v1/health/connect/{service}", decoded, news, region)

    def _gateways(self, region: str) -> None:
        def decoded(body: Any) -> Any:
            return decode.gateways(body, region)

        def news(value: Any, _: int) -> None:
            self.sink.fact(GatewaysSeen(region, value))

        self._health(f"gateways/{region}", "/v1/health/service/mesh-gateway", decoded, news, region)

    def _proxies_of(self, service: str) -> None:
        groups = len(GATEWAY_SERVICES) + len(self.services)

        def news(value: Any, _: int) -> None:
            self._proxies[service] = value
            if len(self._proxies) == groups:
                everyone = tuple(p for group in sorted(self._proxies) for p in self._proxies[group])
                self.sink.fact(ProxiesSeen(everyone))

        self._health(f"proxies/{service}", f"/v1/health/service/{service}", decode.proxies, news, self.here)

    def _health(
        self,
        name: str,
        path: str,
        decoded: Callable[[Any], tuple[Any, tuple[str, ...]]],
        news: Callable[[Any, int], None],
        region: str,
    ) -> None:
        async def fetch(index: int, wait_s: float) -> tuple[int, Any]:
            answer = await self.consul.get(path, {"dc": region}, index, wait_s)
            value, problems = decoded(answer.body)
            for problem in problems:
                log.warning("%s: %s", name, problem)
            return answer.index, value

        self._watch(name, fetch, news, region)

    def _watch(
        self,
        name: str,
        fetch: Callable[[int, float], Awaitable[tuple[int, Any]]],
        news: Callable[[Any, int], None],
        region: str | None = None,
    ) -> None:
        far = region not in (None, self.here)
        made = Watch(
            name,
            fetch,
            news,
            clock=self._clock,
            rng=self._rng,
            wait_s=watch.REMOTE_WAIT_S if far else watch.LOCAL_WAIT_S,
            tuning=watch.REMOTE if far else watch.LOCAL,
        )
        self.watches[name] = made
        self._spawn(made.run())

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
