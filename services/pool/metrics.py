"""The pool in Prometheus' terms: what the verbs of this instance did and how long they took.

Law: counts; decides nothing. Names begin with weir_pool_; the instance's state is told by services/telemetry.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from services.pool.hotstart import HotPool
from services.pool.steps import Outcome

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
DONE = "done"


def watch(pool: HotPool, registry: CollectorRegistry) -> None:
    """Register the metrics of this pool."""
    verbs = Counter(
        "weir_pool_verbs", "Sleeps, wakes, coolings by what came of them", ["verb", "code"], registry=registry
    )
    seconds = Histogram(
        "weir_pool_verb_seconds", "How long they took", ["verb"], buckets=SECONDS, registry=registry
    )
    recovered = Counter("weir_pool_cold_starts", "Engines built anew in this process", registry=registry)

    def told(outcome: Outcome) -> None:
        verbs.labels(outcome.verb, outcome.code or DONE).inc()
        seconds.labels(outcome.verb).observe(outcome.seconds)
        recovered.inc(pool.parts.engine.renewals - seen[0])
        seen[0] = pool.parts.engine.renewals

    seen = [pool.parts.engine.renewals]
    pool.watchers.append(told)
