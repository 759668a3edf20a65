"""Write status/traffic/<service>/<region>: the shell around mesh.controlplane.status.

Law: writes status keys only. A failed write is counted and tried again with the next news; the status of a
Consul that is down can't be written into it, and nothing else waits for it.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mesh.clock import Clock
from mesh.consul import keys
from mesh.consul.client import Consul
from mesh.consul.errors import ConsulError
from mesh.controlplane import decide, status
from mesh.controlplane.plane import Plane
from mesh.controlplane.status import Load, Observed, Progress, ProxyView

log = logging.getLogger("weir.reporter")

QUIET_S = 1.0
"""Seconds without news after which the observed shares are looked at anyway."""
MIN_GAP_S = 0.02
"""Least seconds between two writes: a burst of acknowledgements becomes one document."""


class Reporter:
    """Keeps the status documents of one region true.

    views(): the ingress streams as they stand. versions(): desired route fingerprint of the ingress.
    path(): words by region for the document's `path`.
    """

    def __init__(
        self,
        consul: Consul,
        plane: Plane,
        clock: Clock,
        views: Callable[[], Sequence[ProxyView]],
        version: Callable[[], str],
        path: Callable[[], Mapping[str, str]],
    ) -> None:
        self._consul, self._plane, self._clock = consul, plane, clock
        self._views, self._version, self._path = views, version, path
        self._progress: dict[str, Progress] = {}
        self._observed: dict[str, Observed] = {}
        self._written: dict[str, dict[str, Any]] = {}

    def load(self, service: str, requests: Mapping[tuple[str, str], int], seconds: float) -> None:
        """One interval of load reports of one ingress, that ends now. seconds: its length."""
        seen = self._observed.get(service, Observed())
        self._observed[service] = seen.add(Load(self._clock.monotonic(), requests, seconds))

    def note(self) -> None:
        """Look at the streams at once, so that "applied" is the time of the last acknowledgement and not of
        the next document; writing follows."""
        if self._plane.decision is not None:
            version, views = self._version(), self._views()
            for service in self._plane.decision.plans:
                self._advance(service, version, views)
        self._plane.wakes.status.set()

    async def run(self) -> None:
        """Until cancelled: look after news, and once a quiet second."""
        wake = self._plane.wakes.status
        while True:
            try:
                async with asyncio.timeout(QUIET_S):
                    await wake.wait()
            except TimeoutError:
                pass
            wake.clear()
            await self.tick()
            await self._clock.sleep(MIN_GAP_S)

    async def tick(self) -> None:
        """Bring every document up to date; write the ones that changed."""
        decision = self._plane.decision
        if decision is None:
            return
        version, views, strangers = self._version(), self._views(), decide.strangers(self._plane.inputs)
        for service, plan in decision.plans.items():
            step = self._advance(service, version, views)
            seen = self._observed.get(service, Observed()).shares(self._clock.monotonic())
            mine = [s for s in strangers if s.key.startswith(f"{keys.CONFIG}{service}/")]
            general = [s for s in strangers if s not in mine] if service == min(decision.plans) else []
            here = self._plane.inputs.facts.region
            body = status.document(plan, here, step, seen, self._path(), [*mine, *general])
            if _news(body) != _news(self._written.get(service, {})):
                await self._write(service, here, body)

    def _advance(self, service: str, version: str, views: Sequence[ProxyView]) -> Progress:
        last = self._progress.get(service, Progress())
        step = status.progress(last, version, views, self._plane.times, self._clock.time())
        if step.version != last.version:
            self._observed[service] = Observed(since=self._clock.monotonic())
        if step.times.applied and not (last.times.applied and step.version == last.version):
            self._plane.metrics.applied_seconds.observe(max(0.0, step.times.applied - step.times.seen))
        self._progress[service] = step
        return step

    async def _write(self, service: str, region: str, body: dict[str, Any]) -> None:
        text = json.dumps(body, sort_keys=True).encode()
        try:
            await self._consul.kv_put(keys.status(service, region), text)
        except ConsulError as error:
            self._plane.metrics.status_failures.inc()
            log.warning("status of %s not written: %s", service, error.why)
            return
        self._written[service] = body


def _news(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """What makes a document worth writing again: all but the width of the window it was observed in."""
    seen = {k: v for k, v in body.get("observed", {}).items() if k != "window_s"}
    return {**body, "observed": seen}
