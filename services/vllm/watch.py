"""Looks at a server's metrics every so often and keeps the last look.

Law: one loop; reading them is metrics.py's. A server that answers nothing for SILENT_S hangs for good, which
no request may ever find out by itself: its socket still takes connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from mesh.clock import Clock
from services.faults import EngineFault
from services.upstream.client import Upstream
from services.vllm.metrics import Figures, figures

log = logging.getLogger("weir.engine")

SILENT_S = 60.0


class Watch:
    """figures, text: of the last look; empty before. hung: why it counts as dead, or empty."""

    def __init__(self, client: Upstream, every_s: float, clock: Clock) -> None:
        self._client, self._every_s, self._clock = client, every_s, clock
        self._nudge = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.figures, self.text, self.hung = Figures(), "", ""

    async def look(self) -> None:
        """Raises EngineFault when it can't be read."""
        text = await self._client.ask("GET", "/metrics")
        try:
            self.figures, self.text = figures(text), text
        except ValueError as error:
            raise EngineFault(f"/metrics is no Prometheus text: {error}") from error

    def begin(self) -> None:
        self._task = asyncio.create_task(self._keep_looking(), name="vllm metrics")

    def nudge(self) -> None:
        """Something changed: look soon."""
        self._nudge.set()

    async def end(self) -> None:
        """Nothing is known any more. Fine to call twice."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
        self.figures, self.text = Figures(), ""

    async def _keep_looking(self) -> None:
        seen = self._clock.monotonic()
        while True:
            try:
                await self.look()
                seen = self._clock.monotonic()
            except EngineFault as error:
                silent = self._clock.monotonic() - seen
                log.warning("vLLM's metrics, missing for %.0f s: %s", silent, error)
                if silent > SILENT_S:
                    self.hung = f"the vLLM server has answered nothing for {silent:.0f} s"
            # A burst of ends is one look: the pause comes first, then whatever asked during it.
            await self._clock.sleep(min(0.05, self._every_s))
            # Not wait_for: in 3.11 it swallows a cancellation that comes together with what it waits for.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._every_s):
                    await self._nudge.wait()
            self._nudge.clear()
