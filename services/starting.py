"""How the engine of an executor starts: talked of while it takes long, ended early by a signal.

Law: decides nothing about engines. A start that fails for want of memory is told to people; a bug stays one.
"""

from __future__ import annotations

import asyncio
import errno
import logging

from mesh.clock import Clock
from regions.cli.errors import WeirError
from services.ending import unless
from services.engine import Engine

log = logging.getLogger("weir.executor")

STILL_S = 5.0
"""How often a long start is talked of."""


async def started(engine: Engine, asked: asyncio.Event, clock: Clock) -> bool:
    """Start it, a matter of minutes for some; False when the process was asked to stop first.

    Raises WeirError where memory is too short, and whatever else the engine raises.
    """
    facts = engine.facts()
    log.info("the engine starts: %s, model %s", facts.name, facts.model)
    talking = asyncio.create_task(_talk(clock), name="start-talk")
    try:
        await unless(asked, asyncio.ensure_future(engine.start()))
    except (OSError, MemoryError) as error:
        if isinstance(error, OSError) and error.errno != errno.ENOMEM:
            raise
        way_out = "give its KV cache less (weir kv plan says what fits), or free some"
        raise WeirError(f"engine {facts.name}", "not enough memory to start", way_out) from error
    finally:
        talking.cancel()
    return not asked.is_set()


async def _talk(clock: Clock) -> None:
    began = clock.monotonic()
    while True:
        await clock.sleep(STILL_S)
        log.info("the engine is still starting, after %.0f s", clock.monotonic() - began)
