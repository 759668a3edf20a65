"""Parallel reads of many ranges, by the way that a short measurement on these very files found fastest.

Law: reads and measures; what the bytes mean is the caller's. The measurement is work too: the first ranges
are read in one way, the next in another, all others in the faster one, so that no byte is read twice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from mesh.clock import Clock, SystemClock
from services.weights import faults, pages, sources
from services.weights.plan import SECTOR, Span
from services.weights.sources import Source, Way

log = logging.getLogger("weir.weights")

THREADS = 8
"""Reads in flight: disks reach their rate only with several. More than processors on purpose."""
CACHED = 0.9
"""Share of the files in the page cache from which on nothing is measured: no way beats a mapping then."""
_SPARE = 2
"""Buffers that wait for the consumer while all threads read."""

TRIED = (Way.DIRECT, Way.MAPPED)
"""Past the page cache, or through it without a copy: what lies between them is never the best."""

Check = Callable[[Span, memoryview], None]
"""Called in the reading thread; raises what is wrong with these bytes."""


@dataclass(frozen=True, slots=True)
class Figure:
    """What one way gave. nbytes read in `seconds`."""

    way: Way
    nbytes: int
    seconds: float

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.nbytes / max(self.seconds, 1e-9)


@dataclass(frozen=True, slots=True)
class Choice:
    """The way taken for most ranges, and why: the figures that chose it, or a page cache that has the files.

    Neither where there was too little to measure, or the caller ordered it. cached: share of the files in the
    page cache before, 0..1.
    """

    way: Way
    figures: tuple[Figure, ...] = ()
    cached: float = 0.0

    def __str__(self) -> str:
        measured = [f"{f.way} {f.rate / 1e9:.2f} GB/s" for f in self.figures]
        return f"{self.way} ({', '.join([*measured, f'{self.cached:.0%} in the page cache'])})"


def decide(figures: Sequence[Figure], cached: float) -> Choice:
    """The fastest measured way; unmeasured, a mapping of what the page cache has, else plain reads."""
    if figures:
        return Choice(max(figures, key=lambda f: f.rate).way, tuple(figures), cached)
    return Choice(Way.MAPPED if cached >= CACHED else Way.BUFFERED, (), cached)


class Reader:
    """Reads ranges of these files. way: take this one and don't measure."""

    def __init__(
        self,
        paths: Mapping[str, Path],
        *,
        way: Way | None = None,
        threads: int = THREADS,
        clock: Clock | None = None,
    ) -> None:
        self._paths, self._way, self._threads = paths, way, threads
        self._clock = clock or SystemClock()
        self.choice: Choice | None = None

    def stream(self, spans: Sequence[Span], check: Check) -> Generator[tuple[Span, memoryview], None, None]:
        """Every range with its bytes, as they come; a view is good until the next is asked for.

        Raises WeightsError naming the shard, and what `check` raises.
        """
        size = max((s.stop - s.start for s in spans), default=0) + 2 * SECTOR
        buffers = [memoryview(pages.anonymous(size, dense=True)) for _ in range(self._threads + _SPARE)]
        with ThreadPoolExecutor(self._threads, "weir-read") as pool:
            left = list(spans)
            figures = []
            cached = 0.0 if self._way else sources.cached(self._paths.values())
            for way in self._trials(spans, cached):
                # The mapping is tried on half as much: where it does not suit a disk it takes twice as long.
                few = self._threads if way is TRIED[0] else self._threads // 2
                trial, left = left[:few], left[few:]
                stage = _Stage(self._paths, way, pool, buffers, self._clock)
                yield from stage.run(trial, check)
                figures.append(stage.figure(trial))
            self.choice = Choice(self._way) if self._way else decide(figures, cached)
            if spans:
                yield from _Stage(self._paths, self.choice.way, pool, buffers, self._clock).run(left, check)

    def _trials(self, spans: Sequence[Span], cached: float) -> tuple[Way, ...]:
        """The ways worth measuring: none when one was ordered, or the page cache has it all, or there is too
        little to read.
        """
        if self._way is not None or cached >= CACHED or len(spans) < 2 * len(TRIED) * self._threads:
            return ()
        usable = sources.ways(self._paths[spans[0].shard])
        return TRIED if all(way in usable for way in TRIED) else ()


class _Stage:
    """Some ranges read in one way."""

    def __init__(
        self,
        paths: Mapping[str, Path],
        way: Way,
        pool: ThreadPoolExecutor,
        buffers: list[memoryview],
        clock: Clock,
    ) -> None:
        self._paths, self._way, self._pool, self._clock = paths, way, pool, clock
        self._free = list(buffers)
        self._files: dict[str, Source] = {}
        self._times: list[tuple[float, float]] = []

    def run(self, spans: Sequence[Span], check: Check) -> Generator[tuple[Span, memoryview], None, None]:
        waiting = list(reversed(spans))
        running: dict[Future[memoryview], tuple[Span, memoryview]] = {}
        try:
            self._open(spans)
            while waiting or running:
                while waiting and self._free:
                    span, buffer = waiting.pop(), self._free.pop()
                    running[self._pool.submit(self._read, span, buffer, check)] = (span, buffer)
                for done in wait(running, return_when=FIRST_COMPLETED).done:
                    span, buffer = running.pop(done)
                    yield span, done.result()
                    self._free.append(buffer)
        finally:
            wait(running)
            running.clear()
            for source in self._files.values():
                source.close()

    def _open(self, spans: Sequence[Span]) -> None:
        for name in {span.shard for span in spans}:
            try:
                self._files[name] = sources.open_source(self._paths[name], self._way)
            except (OSError, ValueError) as error:
                raise faults.unreadable(self._paths[name], error) from error

    def _read(self, span: Span, buffer: memoryview, check: Check) -> memoryview:
        started = self._clock.monotonic()
        try:
            view = self._files[span.shard].take(span.start, span.stop, buffer)
        except OSError as error:
            raise faults.unreadable(self._paths[span.shard], error) from error
        self._times.append((started, self._clock.monotonic()))
        check(span, view)
        return view

    def figure(self, spans: Sequence[Span]) -> Figure:
        seconds = max(end for _, end in self._times) - min(start for start, _ in self._times)
        return Figure(self._way, sum(s.stop - s.start for s in spans), seconds)
