"""When a request may open a connection: few at a time, and a connection that comes free goes first.

Law: counts, opens nothing itself; no clock. Without it a load generator that falls behind collapses: each
late request finds no idle connection, opens one, and the TLS handshakes (milliseconds of CPU on both sides)
make the next ones late too. Measured at 250 requests/s on a busy machine: 740 of 750 requests paid for a
handshake, the median went from 2 ms to 10 s, and all of it looked like the mesh's latency.
"""

from __future__ import annotations

import asyncio
from collections import deque

OPENING = 16
"""Connections being opened at one time. Far more than a handshake's share of a core allows on loopback, and
enough to grow by some 25 a second over a path of 200 ms."""


class Gate:
    """Passes for requests to one server. The number of connections in use is not bounded."""

    def __init__(self, opening: int = OPENING) -> None:
        self._free = opening
        self._idle = 0
        self._waiting: deque[asyncio.Future[Pass]] = deque()

    async def enter(self) -> Pass:
        """Wait until there is an idle connection or one may be opened. First come, first served."""
        if not self._waiting and (found := self._take()) is not None:
            return found
        turn: asyncio.Future[Pass] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                turn.result().leave(reusable=True)  # granted in the same moment: hand it on
            raise

    def _take(self) -> Pass | None:
        if self._idle:
            self._idle -= 1
            return Pass(self, opening=False)
        if self._free:
            self._free -= 1
            return Pass(self, opening=True)
        return None

    def _give(self, *, idle: int = 0, free: int = 0) -> None:
        self._idle += idle
        self._free += free
        while self._waiting and (self._waiting[0].done() or self._idle or self._free):
            turn = self._waiting.popleft()
            if not turn.done() and (found := self._take()) is not None:
                turn.set_result(found)


class Pass:
    """One request's permission. `connected` when its connection stands; `leave` exactly once, at the end."""

    __slots__ = ("_gate", "_opening")

    def __init__(self, gate: Gate, *, opening: bool) -> None:
        self._gate, self._opening = gate, opening

    def connected(self) -> None:
        """The handshake is over: the next one may begin."""
        if self._opening:
            self._opening = False
            self._gate._give(free=1)

    def leave(self, *, reusable: bool) -> None:
        """reusable: a connection stands idle now. One that was never opened leaves none."""
        opening, self._opening = self._opening, False
        if opening:
            self._gate._give(free=1)
        else:
            self._gate._give(idle=1 if reusable else 0)
