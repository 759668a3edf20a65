"""How an executor starts: a taken address is said first, a long start is talked of and ended by a signal.

Law: decides nothing about engines. A start that fails for want of memory is told to people; a bug stays one.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Iterable

from mesh.clock import Clock
from regions.cli.errors import WeirError
from services.ending import unless
from services.engine import Engine

log = logging.getLogger("weir.executor")

STILL_S = 5.0
"""How often a long start is talked of."""


def refuse_taken(instance: str, addresses: Iterable[tuple[str, int]]) -> None:
    """Before a model is loaded for minutes. Raises WeirError."""
    for host, port in addresses:
        bare = host.strip("[]")
        with socket.socket(socket.AF_INET6 if ":" in bare else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((bare, port))
            except OSError as error:
                raise taken(instance, f"{bare}:{port}", error) from error


def taken(instance: str, where: str, error: OSError) -> WeirError:
    """What to say of an address that can't be listened on."""
    why = error.strerror or str(error)
    return WeirError(f"executor {instance} on {where}", why, "free the port or choose another address")


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
