"""An aiohttp application on one address.

Law: opens and closes a socket, knows nothing of what is served.
"""

from __future__ import annotations

import asyncio
import contextlib

from aiohttp import web

BACKLOG = 1024
GRACE_S = 0.1
"""What is left when a listener stops has had its drain: it is cut."""


class Listener:
    """`stop` may be called whether or not `start` worked. Raises OSError when the address is taken."""

    def __init__(self, app: web.Application, host: str, port: int) -> None:
        self._app, self._host, self._port = app, host.strip("[]"), port
        self._runner: web.AppRunner | None = None

    def __str__(self) -> str:
        return f"{self._host}:{self._port}"

    async def start(self) -> None:
        # A client that goes away cancels its handler, and with it the sequence it no longer wants.
        self._runner = web.AppRunner(
            self._app, access_log=None, handler_cancellation=True, shutdown_timeout=GRACE_S
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, self._host, self._port, backlog=BACKLOG).start()

    @property
    def port(self) -> int:
        """The port that is listened on: another than asked for when that was 0."""
        bound = self._runner.addresses if self._runner is not None else []
        return int(bound[0][1]) if bound else self._port

    async def stop(self) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(5.0):
                    await runner.cleanup()
