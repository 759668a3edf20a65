"""vLLM's sleep and wake, not believed but checked.

Law: only the verbs of vLLM's dev mode; whether the same tokens come after a wake is for the engine to ask. A
200 proves nothing: vLLM 0.32 on a CPU answers "sleeping" to everybody, says so in /is_sleeping and in its
metrics, gives not one byte back, and then lets requests wait for ever (tried; on GPUs see vllm#45520,
#32714). So after sleeping the memory is measured, and before waking there must be room for what was given
back: a wake that runs out of memory leaves blocks mapped for good (vllm#34600).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from mesh.clock import Clock
from services.faults import EngineFault, WakeFailed
from services.upstream.client import Upstream
from services.vllm.memory import Level, Meter

LOOK_S = 0.1
"""Between two looks at the memory."""
MIB = 2**20


@dataclass(frozen=True, slots=True)
class SleepRules:
    """min_freed: share of the memory held that sleeping must give back, within settle_s of its answer.
    limit_s: for one verb."""

    min_freed: float
    limit_s: float
    settle_s: float


class Sleeper:
    """Verbs of one server. freed: bytes that its last sleep gave back."""

    def __init__(
        self, client: Upstream, level: Callable[[], Awaitable[Level]], rules: SleepRules, clock: Clock
    ) -> None:
        self._client, self._level, self._rules, self._clock = client, level, rules, clock
        self.freed = 0

    async def sleep(self, level: int) -> None:
        """Raises RuntimeError when it doesn't sleep or gives too little back; what state it is in then is
        unknown."""
        before = (await self._level()).held
        try:
            await self._post(f"/sleep?level={level}")
            asleep = await self._is_sleeping()
        except EngineFault as error:
            raise RuntimeError(f"vLLM would not sleep: {error}") from error
        if not asleep:
            raise RuntimeError("vLLM said that it sleeps and does not")
        self.freed = await self._given_back(before)
        if self.freed < self._rules.min_freed * before:
            raise RuntimeError(
                f"vLLM sleeps and gave back {self.freed // MIB} MiB of {before // MIB}: "
                f"less than the share {self._rules.min_freed:g} that it must"
            )

    async def _given_back(self, before: int) -> int:
        end = self._clock.monotonic() + self._rules.settle_s
        while True:
            freed = max(0, before - (await self._level()).held)
            if freed >= self._rules.min_freed * before or self._clock.monotonic() >= end:
                return freed
            await self._clock.sleep(LOOK_S)

    async def wake(self, level: int) -> None:
        """Raises WakeFailed: before anything was touched when there is no room."""
        free = (await self._level()).free
        if free is not None and free < self.freed:
            raise WakeFailed(f"no room to wake: needs {self.freed // MIB} MiB and {free // MIB} are free")
        try:
            if level == 1:
                await self._post("/wake_up")
            else:
                await self._reload()
            # What the cache holds was computed before; with other weights it would be wrong.
            await self._post("/reset_prefix_cache")
            asleep = await self._is_sleeping()
        except EngineFault as error:
            raise WakeFailed(f"vLLM did not wake: {error}") from error
        if asleep:
            raise WakeFailed("vLLM said that it is awake and is not")

    async def _reload(self) -> None:
        """After level 2 there are no weights. The cache comes last: a forward pass between the two would read
        what isn't there (vllm#44395), and loading wants the room."""
        await self._post("/wake_up?tags=weights")
        await self._post("/collective_rpc", json={"method": "reload_weights"})
        await self._post("/wake_up?tags=kv_cache")

    async def _post(self, path: str, **more: object) -> None:
        await self._client.ask("POST", path, limit_s=self._rules.limit_s, **more)

    async def _is_sleeping(self) -> bool:
        text = await self._client.ask("GET", "/is_sleeping")
        try:
            return bool(json.loads(text)["is_sleeping"])
        except (ValueError, KeyError, TypeError) as error:
            raise EngineFault(f"/is_sleeping answered {text[:100]!r}") from error


def in_thread(measure: Meter, pid: Callable[[], int]) -> Callable[[], Awaitable[Level]]:
    """A level for a loop: measuring takes milliseconds."""
    return lambda: asyncio.to_thread(measure, pid())
