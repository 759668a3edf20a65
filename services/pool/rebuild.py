"""An engine built anew, at home or elsewhere, from the snapshot, and held against it.

Law: nothing is built where the model's files are others than they were; nothing that was built counts unless
it is the same engine and answers the same. Without a snapshot (it never slept) the first way is taken again.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from functools import partial
from pathlib import Path

from services.devices.door import Binding
from services.engine import Engine
from services.faults import WakeFailed
from services.pool.describe import model_parts
from services.pool.memory import Memory, jsonable
from services.pool.parts import Parts
from services.pool.snapshot import Snapshot, changed, foreign
from services.pool.steps import Stopwatch
from services.pool.verify import Answer, ask, garbage


async def rebuild(parts: Parts, memory: Memory, where: Binding, watch: Stopwatch, step: str) -> None:
    """The old engine is closed already. Raises what building and starting raise, WakeFailed."""
    snapshot = memory.snapshot()
    if snapshot is not None and snapshot.model.files and parts.model_folder is not None:
        with watch.step("model's files"):
            await same_files(snapshot, parts.model_folder)
    build = None if snapshot is None or parts.build is None else partial(parts.build, snapshot.recipe)
    with watch.step(step) as notes:
        notes += [where.uuid] if where.uuid else []
        notes += ["from the snapshot"] if build else []
        async with asyncio.timeout(parts.settings.start_limit_s):
            await parts.engine.renew(where, build)
        parts.herald.place(where.uuid)
    if snapshot is not None:
        same_engine(snapshot, parts)


async def same_files(snapshot: Snapshot, folder: Path) -> None:
    """Raises WakeFailed, WeirError for a file that can't be read."""
    if wrong := changed(snapshot.model, await asyncio.to_thread(model_parts, folder)):
        raise WakeFailed(wrong)


def same_engine(snapshot: Snapshot, parts: Parts) -> None:
    """Raises WakeFailed."""
    if wrong := foreign(snapshot, asdict(parts.instance.identity), jsonable(parts.engine.facts())):
        raise WakeFailed(f"the engine is not that of the snapshot: {wrong}")


async def same_answer(expected: Answer | None, engine: Engine, limit_s: float) -> Answer:
    """What the engine says to the fixed prompt. Raises WakeFailed where that isn't what is expected."""
    got = await ask(engine, limit_s)
    if expected is not None and (wrong := garbage(expected, got)):
        raise WakeFailed(wrong)
    return got
