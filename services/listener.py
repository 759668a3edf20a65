"""An aiohttp application on one address.

Law: opens and closes a socket, knows nothing of what is served.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

BACKLOG = 1024
GRACE_S = 0.1
"""What is left when a listener stops has had its drain: it is cut."""


class _OneLine(logging.Filter):
    """Nonsense from a client in one line, without a part of it: aiohttp logs a traceback that quotes what it
    could not read, and that may be somebody's key."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            record.levelno, record.levelname = logging.WARNING, "WARNING"
            record.exc_info = record.exc_text = None
            record.msg, record.args = f"{record.getMessage()}: no HTTP ({type(error).__name__})", ()
        return True


_ONE_LINE = _OneLine()


class Listener:
    """`stop` may be called whether or not `start` worked. Raises OSError when the address is taken."""

    def __init__(self, app: web.Application, host: str, port: int) -> None:
        self._app, self._host, self._port = app, host.strip("[]"), port
        self._runner: web.AppRunner | None = None

    def __str__(self) -> str:
        return f"{self._host}:{self._port}"

    async def start(self) -> None:
        logging.getLogger("aiohttp.server").addFilter(_ONE_LINE)
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
