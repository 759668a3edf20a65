"""The load report of one instance, ready to stand in a header.

Law: reads counters; asks the operating system for CPU time at most twice a second.
"""

from __future__ import annotations

import os
import resource

from mesh.clock import Clock
from services.instance import Instance
from services.telemetry.orca import Counts, Meter, report


class Load:
    """`header()` is the value of orca.HEADER."""

    def __init__(self, instance: Instance, clock: Clock) -> None:
        self._it = instance
        self._meter = Meter(clock.monotonic, self._counts, len(os.sched_getaffinity(0)))

    def header(self, ended: int = 0) -> str:
        """ended: sequences of the answer that it stands in which have given their places back."""
        it = self._it
        return report(it.engine.facts(), it.engine.stats(), it.in_flight, self._meter.rates(), ended)

    def _counts(self) -> Counts:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return Counts(used.ru_utime + used.ru_stime, self._it.answers, self._it.errors)
