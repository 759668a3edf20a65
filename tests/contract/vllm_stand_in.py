"""The vllm engine in front of the stand-in server: started, and closed whatever happens.

Law: helpers only.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import psutil

from services.vllm.engine import VllmEngine
from tests.contract.engine_subjects import stand_in
from tests.contract.engine_suite import PROMPTS, Subject
from tests.fakes.vllm_wire import ORDERS

ASK = Subject(lambda: None, "vllm", prompts=PROMPTS).ask  # type: ignore[arg-type, return-value]


@contextlib.asynccontextmanager
async def started(folder: Path, **options: object) -> AsyncIterator[VllmEngine]:
    engine = stand_in(folder, **options)
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()


def family() -> list[psutil.Process]:
    """Every process that descends from this one and works by this test's orders (or is dead and was not
    waited for)."""
    return [one for one in psutil.Process().children(recursive=True) if _ours(one)]


def _ours(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_ZOMBIE or process.environ().get(ORDERS) == os.environ[ORDERS]
    return False
