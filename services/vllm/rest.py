"""Sleeping and waking of one server, proved by a fixed prompt.

Law: owns how deep the server sleeps and what it answered before; the verbs are in sleep.py. After a failure
the server is either as it was before, or `broken` for good.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from typing import Protocol

from services.engine import FIXED_PROMPT, GenerateRequest
from services.faults import EngineFault, WakeFailed
from services.upstream.client import Upstream
from services.vllm.memory import Level

LEVELS = (1, 2)
PROBE = GenerateRequest("weir-probe", FIXED_PROMPT, 8, ignore_eos=True)
"""Answered before the first request and after every wake: greedy, so always with the same tokens."""


class Verbs(Protocol):
    """sleep.py's Sleeper or suspend.py's Suspender."""

    async def sleep(self, level: int) -> None: ...
    async def wake(self, level: int) -> None: ...


Said = tuple[tuple[int, ...], str]


class Rest:
    """level: how deep it sleeps, 0 awake. memory: as measured last. broken: why it is of no use any more, or
    empty."""

    def __init__(self, client: Upstream, sleeper: Verbs, measure: Callable[[], Awaitable[Level]]) -> None:
        self._client, self._sleeper, self._measure = client, sleeper, measure
        self._witness: Said = ((), "")
        self.level, self.broken, self.memory = 0, "", Level(0)

    async def learn(self) -> None:
        """Ask the fixed prompt for the first time. Raises EngineFault."""
        self._witness = await self._ask()
        self.memory = await self._measure()

    async def sleep(self, level: int) -> None:
        """Raises RuntimeError when it didn't work; then it is awake and answers as before, or broken."""
        self.level = level
        try:
            await self._sleeper.sleep(level)
        except RuntimeError:
            await self._undo(level)
            raise
        finally:
            self.memory = await self._measure()

    async def _undo(self, level: int) -> None:
        """After a sleep that failed nobody knows what state the server is in: wake it and see."""
        try:
            await self._woken(level)
        except WakeFailed as error:
            self.broken = f"vLLM did not sleep as it should, and then: {error}"

    async def wake(self) -> None:
        """Raises WakeFailed when there is no room, when vLLM doesn't wake, or when the fixed prompt gets
        another answer than before; it counts as asleep then."""
        if not self.level:
            return
        try:
            await self._woken(self.level)
        finally:
            self.memory = await self._measure()

    async def _woken(self, level: int) -> None:
        await self._sleeper.wake(level)
        try:
            said = await self._ask()
        except EngineFault as error:
            raise WakeFailed(f"vLLM woke and can't answer: {error}") from error
        if said != self._witness:
            # It is of no use awake; if it doesn't sleep again either, a cold start will end it.
            with contextlib.suppress(RuntimeError):
                await self._sleeper.sleep(level)
            raise WakeFailed("vLLM woke and answers the fixed prompt with other tokens than before")
        self.level = 0

    async def _ask(self) -> Said:
        tokens = [token async for token in self._client.generate(PROBE)]
        return tuple(token.token_id for token in tokens), "".join(token.text for token in tokens)
