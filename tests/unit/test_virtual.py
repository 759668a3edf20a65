"""The loop in virtual time: what threads do takes none of it."""

from __future__ import annotations

import asyncio
import threading

from tests.virtual import run


def test_no_time_passes_while_a_thread_works() -> None:
    """Else a story's outcome would depend on how fast the machine is."""

    async def main() -> None:
        timer = asyncio.create_task(asyncio.sleep(0.001))
        await asyncio.to_thread(threading.Event().wait, 0.05)
        assert not timer.done()
        await timer
        assert asyncio.get_running_loop().time() == 0.001

    run(main())
