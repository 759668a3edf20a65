"""How an engine's start is told: progress while it lasts, want of memory as an error for people."""

from __future__ import annotations

import asyncio
import errno
import socket

import pytest

from regions.cli.errors import WeirError
from services.engines.echo import EchoEngine, EchoOptions
from services.starting import STILL_S, refuse_taken, started
from tests.fakes.loop_clock import LoopClock
from tests.virtual import run


class Slow(EchoEngine):
    def __init__(self, seconds: float, error: Exception | None = None) -> None:
        super().__init__(EchoOptions(), "m")
        self._seconds, self._error = seconds, error

    async def start(self) -> None:
        await asyncio.sleep(self._seconds)
        if self._error is not None:
            raise self._error


async def start(engine: EchoEngine, asked_after_s: float = 1e6) -> bool:
    asked = asyncio.Event()
    timer = asyncio.get_running_loop().call_later(asked_after_s, asked.set)
    try:
        return await started(engine, asked, LoopClock())
    finally:
        timer.cancel()


def test_a_long_start_is_talked_of_and_a_short_one_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "weir.executor")

    def told() -> list[str]:
        return [row.getMessage() for row in caplog.records if row.name == "weir.executor"]

    assert run(start(Slow(STILL_S * 0.5)))
    assert len(told()) == 1
    assert run(start(Slow(STILL_S * 2.5)))
    assert len(told()) == 4
    assert "still starting, after 10 s" in told()[-1]


def test_a_signal_ends_the_start() -> None:
    assert not run(start(Slow(1000.0), asked_after_s=1.0))


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.ENOMEM, "Cannot allocate memory")])
def test_want_of_memory_has_a_way_out(error: Exception) -> None:
    with pytest.raises(WeirError, match="not enough memory") as caught:
        run(start(Slow(0.1, error)))
    assert "weir kv plan" in caught.value.way_out


def test_any_other_error_stays_what_it_is() -> None:
    with pytest.raises(OSError, match="no such"):
        run(start(Slow(0.1, OSError(errno.ENOENT, "no such file"))))


OWN = "127.107.99.2"
"""Where nobody else's connection may take the port meanwhile."""


def test_a_taken_address_is_said_and_a_free_one_left_free() -> None:
    with socket.create_server((OWN, 0)) as mine:
        port = mine.getsockname()[1]
        with pytest.raises(WeirError, match=rf"executor i on {OWN}:{port}: Address already in use"):
            refuse_taken("i", [(OWN, port)])
    refuse_taken("i", [(OWN, port), ("localhost", 0), (OWN, port)])
    with pytest.raises(WeirError, match="free the port or choose another"):
        refuse_taken("i", [("192.0.2.1", port)])
