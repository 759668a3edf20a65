"""What every Engine must do from its making to its end: the suite's checks that take an engine of their own.

Law: as in engine_suite.py.
"""

from __future__ import annotations

import asyncio
import os
import threading

import psutil
import pytest

from services.engine import EngineStats
from services.faults import EngineFault
from tests.contract.engine_suite import Subject, answer


async def life(it: Subject) -> None:
    """Not before start, not started twice; closed as often as one likes; stats never raise; facts stay."""
    engine = it.make()
    assert isinstance(engine.stats(), EngineStats)
    with pytest.raises((RuntimeError, EngineFault)):
        await answer(engine, it.ask(max_tokens=1))
    try:
        await engine.start()
        with pytest.raises(RuntimeError):
            await engine.start()
        assert len(await answer(engine, it.ask(max_tokens=2))) == 2
        facts = engine.facts()
    finally:
        await engine.close()
    assert engine.facts() == facts, "closed, it is still asked what it is"
    await engine.close()
    assert isinstance(engine.stats(), EngineStats)
    assert not engine.stats().running
    never_started = it.make()
    await never_started.close()


LIVES = 5


def _held() -> tuple[int, int, int]:
    """Files, threads and child processes of this process."""
    here = psutil.Process()
    return len(os.listdir("/proc/self/fd")), threading.active_count(), len(here.children(recursive=True))


def leaves_nothing(it: Subject) -> None:
    """The first life may open what a process opens once; of the others one at least must give back all that
    it took. A leak would be in each; what a thread of an earlier test opens meanwhile isn't."""
    held = []
    while len(held) < LIVES:
        asyncio.run(life(it))
        held.append(_held())
        if len(held) > 1 and all(after <= before for before, after in zip(*held[-2:], strict=True)):
            return
    pytest.fail(f"files, threads, processes after each life: {held}")
