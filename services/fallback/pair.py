"""Two engines of one model that start, sleep, wake and end together.

Law: both or none: a failure half-way is undone before it is told. Who answers what is decided elsewhere.
"""

from __future__ import annotations

from dataclasses import replace

from regions.cli.errors import UsageError
from services.engine import Engine, EngineFacts, EngineStats


class Pair:
    """asleep, started: of both. shared: they use the same memory. share: how many of the primary's sequences
    the secondary has room for, 0..1; 1 where either has no limit."""

    def __init__(self, primary: Engine, secondary: Engine, *, shared: bool = False) -> None:
        self.primary, self.secondary, self._shared = primary, secondary, shared
        self.started = self.asleep = False
        self.share, self._level = 1.0, 1

    async def start(self) -> None:
        """Raises UsageError when the two serve different models; both are closed again then, as after any
        failure."""
        if self.started:
            raise RuntimeError("the engines run already")
        try:
            await self.primary.start()
            await self.secondary.start()
            first, second = self.primary.facts(), self.secondary.facts()
            if first.model != second.model:
                raise UsageError(
                    f"fallback from {first.name} to {second.name}",
                    f"they serve different models: {first.model!r} and {second.model!r}",
                    "give both engines the same model",
                )
        except BaseException:
            await self.close()
            raise
        if first.sequences and second.sequences:
            self.share = min(1.0, second.sequences / first.sequences)
        self.started = True

    async def sleep(self, level: int) -> None:
        """A level that one of them hasn't becomes its next lower one. Raises RuntimeError while either runs
        anything."""
        for engine in (self.primary, self.secondary):
            stats = engine.stats()
            if stats.running or stats.waiting:
                raise RuntimeError("can't sleep: sequences are running")
        await self.primary.sleep(_level(self.primary, level))
        try:
            await self.secondary.sleep(_level(self.secondary, level))
        except BaseException:
            await self.primary.wake()
            raise
        self.asleep, self._level = True, level

    async def wake(self) -> None:
        """When the secondary doesn't wake, the primary is put back to sleep."""
        await self.primary.wake()
        try:
            await self.secondary.wake()
        except BaseException:
            await self.primary.sleep(_level(self.primary, self._level))
            raise
        self.asleep = False

    async def close(self) -> None:
        try:
            await self.primary.close()
        finally:
            await self.secondary.close()

    def facts(self, *, long_goes_second: bool) -> EngineFacts:
        """The primary's. context: the longer of the two where long sequences go to the secondary."""
        first, second = self.primary.facts(), self.secondary.facts()
        longer = long_goes_second and first.context and second.context
        return replace(
            first,
            context=max(first.context, second.context) if longer else first.context,
            sleep_levels=tuple(level for level in first.sleep_levels if level in second.sleep_levels),
            weights_bytes=self._memory(first.weights_bytes, second.weights_bytes),
        )

    def stats(self, *, stands_in: bool) -> EngineStats:
        """Of both together; what can't be added (KV, fragmentation) is the primary's.

        stands_in: whether the secondary answers for a dead primary. Then it is dead only when both are, and
        with a primary that can do nothing its capacity is the secondary's, times `share`.
        """
        first, second = self.primary.stats(), self.secondary.stats()
        covered, out = stands_in and not second.dead, bool(first.dead) or not first.capacity
        return replace(
            first,
            running=first.running + second.running,
            waiting=first.waiting + second.waiting,
            tokens=first.tokens + second.tokens,
            prompt_tokens=first.prompt_tokens + second.prompt_tokens,
            preemptions=first.preemptions + second.preemptions,
            memory_bytes=self._memory(first.memory_bytes, second.memory_bytes),
            dead="" if covered else first.dead,
            capacity=second.capacity * self.share if out and covered else first.capacity,
            extra={
                **first.extra,
                **{f"secondary_{name}": value for name, value in second.extra.items()},
                'weir_fallback_engine_dead{engine="primary"}': float(bool(first.dead)),
                'weir_fallback_engine_dead{engine="secondary"}': float(bool(second.dead)),
            },
        )

    def _memory(self, first: int, second: int) -> int:
        return max(first, second) if self._shared else first + second


def _level(engine: Engine, wanted: int) -> int:
    return max((level for level in engine.facts().sleep_levels if level <= wanted), default=wanted)
