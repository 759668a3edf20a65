"""The supervisor's control socket: one JSON object a line, asked and answered.

Law: the protocol only. A request is `{"op": ..., "process": ..., "signal": ...}`, an answer
`{"ok": true, ...}` or `{"ok": false, "error": why}`. Whoever can enter the runtime folder (0700) may ask.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

Handler = Callable[[Mapping[str, Any]], Awaitable[dict[str, Any]]]
MAX_LINE = 64 * 1024


class RequestError(ValueError):
    """The request makes no sense; the text goes back to the asker."""


async def serve(path: Path, handle: Handler) -> asyncio.AbstractServer:
    """Listen on a Unix socket of mode 0600; a socket file left behind by a crash is replaced.

    The caller owns the supervisor lock, so nobody can be listening on the old file.
    """
    path.unlink(missing_ok=True)
    before = os.umask(0o177)
    try:
        return await asyncio.start_unix_server(
            lambda reader, writer: _talk(reader, writer, handle), str(path), limit=MAX_LINE
        )
    finally:
        os.umask(before)


async def _talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, handle: Handler) -> None:
    with contextlib.suppress(ConnectionError, ValueError):  # the asker went away, or sent an endless line
        while line := await reader.readline():
            writer.write(json.dumps(await _answer(line, handle)).encode() + b"\n")
            await writer.drain()
    writer.close()


async def _answer(line: bytes, handle: Handler) -> dict[str, Any]:
    try:
        request = json.loads(line)
        if not isinstance(request, dict):
            raise RequestError("a request is a JSON object")
        return {"ok": True, **await handle(request)}
    except ValueError as error:  # RequestError and broken JSON alike
        return {"ok": False, "error": str(error)}
