"""What an executor knows of itself: who it is, whether it may take requests, how many it has.

Law: state and counters only; no HTTP, no Consul.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from services.engine import Engine
from services.lifecycle import Lifecycle, State
from services.telemetry import inside
from services.telemetry.metrics import EngineMetrics, Source
from services.telemetry.queues import QueueMetrics
from services.telemetry.tally import Tally

BAD_STATUS = 500


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
    """The instance of this process. `idle` is set while nothing is in flight. answers, errors: since start.
    lifecycle: where it stands (services/pool moves it); None: its engine was started already.
    """

    def __init__(self, identity: Identity, engine: Engine, lifecycle: Lifecycle | None = None) -> None:
        self.identity, self.engine = identity, engine
        self.lifecycle = lifecycle or Lifecycle(State.RUNNING)
        self.in_flight = self.answers = self.errors = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self.tally = Tally()
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "weir_executor_requests", "Answers by status", ["code"], registry=self.registry
        )
        self.cuts = Counter(
            "weir_executor_streams_cut", "Streams that failed after they had begun", registry=self.registry
        )
        self._by_code: dict[int, Counter] = {}
        self._gauges()
        queues = QueueMetrics(engine, (identity.model, identity.region, identity.stage))
        self.registry.register(EngineMetrics(self._source(), queues))

    def _gauges(self) -> None:
        engine = self.engine
        self.registry.register(_Tokens(self.tally))
        self._gauge("weir_executor_in_flight", "Requests under way", lambda: float(self.in_flight))
        self._gauge("weir_executor_running", "Sequences running", lambda: float(engine.stats().running))
        self._gauge("weir_executor_waiting", "Sequences waiting", lambda: float(engine.stats().waiting))
        self._gauge("weir_executor_kv_used", "Share of the KV cache in use", lambda: engine.stats().kv_used)
        self._gauge("weir_executor_draining", "1 while draining", lambda: float(self._is(State.DRAINING)))

    def _gauge(self, name: str, text: str, value: object) -> None:
        Gauge(name, text, registry=self.registry).set_function(value)  # type: ignore[arg-type]

    def _source(self) -> Source:
        who = self.identity
        return Source(
            model=who.model,
            region=who.region,
            stage=who.stage,
            tally=self.tally,
            facts=self.engine.facts,
            stats=self.engine.stats,
            why_ill=self.why_ill,
            state=lambda: self.lifecycle.state,
            upstream=lambda: inside.upstream_metrics(self.engine),
        )

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
        self.answers += 1
        self.errors += code >= BAD_STATUS

    def cut(self) -> None:
        """Count one stream that had begun and could not be finished: its status said 200."""
        self.cuts.inc()
        self.errors += 1

    @property
    def dead(self) -> str:
        """Why the engine is broken for good, as a request found out, or empty."""
        return self.lifecycle.dead

    def _is(self, state: State) -> bool:
        return self.lifecycle.state is state

    def why_fallback(self, request_id: str) -> str:
        """Why the second engine answers this request, or empty."""
        return inside.reason_of(self.engine, request_id)

    def why_ill(self) -> str:
        """Why the engine is broken for good, or empty; also where no request has found out yet."""
        return self.dead or self.engine.stats().dead

    def why_not_ready(self) -> str:
        """Why no new request should come, or empty."""
        return self.why_ill() or self.lifecycle.why_not_ready() or self._why_unable()

    def _why_unable(self) -> str:
        """An engine whose server is away recovers by itself: it is alive, and of no use until then."""
        return "" if self.engine.stats().capacity else "the engine can do nothing at the moment"

    def failed(self, reason: str) -> None:
        """The engine is broken for good: /health says so and Consul takes the instance out."""
        self.lifecycle.die(reason)


class _Tokens(Collector):
    def __init__(self, tally: Tally) -> None:
        self._tally = tally

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily("weir_executor_tokens", "Tokens sent", value=self._tally.tokens)
