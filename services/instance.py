"""What an executor knows of itself: who it is, whether it may take requests, how many it has.

Law: state and counters only; no HTTP, no Consul.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge

from services.engine import Engine


@dataclass(frozen=True, slots=True)
class Identity:
    """Labels of one instance; they are registered in Consul and stand in every answer."""

    service: str
    instance: str
    region: str
    zone: str
    stage: str
    version: str
    model: str
    tenant_class: str = ""


class Instance:
    """The running instance. `idle` is set while nothing is in flight."""

    def __init__(self, identity: Identity, engine: Engine) -> None:
        self.identity, self.engine = identity, engine
        self.draining = self.asleep = False
        self.dead = ""
        self.in_flight = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "weir_executor_requests", "Answers by status", ["code"], registry=self.registry
        )
        self._by_code: dict[int, Counter] = {}
        self.tokens = Counter("weir_executor_tokens", "Tokens sent", registry=self.registry)
        self._gauge("weir_executor_in_flight", "Requests under way", lambda: float(self.in_flight))
        self._gauge("weir_executor_running", "Sequences running", lambda: float(engine.stats().running))
        self._gauge("weir_executor_waiting", "Sequences waiting", lambda: float(engine.stats().waiting))
        self._gauge("weir_executor_kv_used", "Share of the KV cache in use", lambda: engine.stats().kv_used)
        self._gauge("weir_executor_draining", "1 while draining", lambda: float(self.draining))

    def _gauge(self, name: str, text: str, value: object) -> None:
        Gauge(name, text, registry=self.registry).set_function(value)  # type: ignore[arg-type]

    def enter(self) -> None:
        self.in_flight += 1
        self.idle.clear()

    def leave(self) -> None:
        self.in_flight -= 1
        if not self.in_flight:
            self.idle.set()

    def answered(self, code: int) -> None:
        """Count one answer (labels are looked up once a code: it costs more than the counting)."""
        counter = self._by_code.get(code)
        if counter is None:
            counter = self._by_code[code] = self.requests.labels(str(code))
        counter.inc()

    async def sleep(self) -> None:
        """Park the engine; /ready says so. Raises RuntimeError while anything runs."""
        await self.engine.sleep()
        self.asleep = True

    async def wake(self) -> None:
        await self.engine.wake()
        self.asleep = False

    def why_not_ready(self) -> str:
        """Why no new request should come, or empty."""
        return self.dead or ("draining" if self.draining else "asleep" if self.asleep else "")

    def failed(self, reason: str) -> None:
        """The engine is broken for good: /health says so and Consul takes the instance out."""
        self.dead = self.dead or reason
