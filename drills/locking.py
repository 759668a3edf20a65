"""One drill at a time: the lock `locks/drill`, held in every region that answers.

Law: KV is per datacenter and the drill may take any of them away, so the lock is taken in all; two drills
always meet in at least one. Taken in name order, so that they meet in the same one first.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

from mesh.consul import keys, lock
from mesh.consul.client import Consul
from mesh.consul.errors import ConsulError
from regions.cli.errors import Refused, WeirError

ANSWER_S = 2.0


@asynccontextmanager
async def one_drill(
    agents: Mapping[str, Consul], holder: Mapping[str, str], *, need_one: bool = True
) -> AsyncIterator[tuple[str, ...]]:
    """Hold the lock for the length of the block; yields the regions it is held in.

    Raises Refused naming the other drill. With need_one, WeirError when no region answers at all.
    """
    async with AsyncExitStack() as stack:
        held = []
        for region in sorted(agents):
            if await _answers(agents[region]):
                try:
                    await stack.enter_async_context(lock.hold(agents[region], keys.DRILL_LOCK, holder))
                except Refused as error:
                    way_out = "wait for it; `weir drill list` shows what runs"
                    raise Refused("another drill", f"{error.why} (lock in {region})", way_out) from error
                held.append(region)
        if need_one and not held:
            raise WeirError("drill lock", "no region's Consul answers", "weir up, or weir drill heal")
        yield tuple(held)


async def _answers(agent: Consul) -> bool:
    """Whether this Consul answers quickly and has a leader; else no session can be made there."""
    try:
        async with asyncio.timeout(ANSWER_S):
            return bool((await agent.get("/v1/status/leader")).body)
    except (ConsulError, TimeoutError):
        return False


async def who(agents: Mapping[str, Consul]) -> Mapping[str, str] | None:
    """What the drill that runs now says of itself, None when none does (or nobody can say)."""
    for region in sorted(agents):
        if await _answers(agents[region]):
            found = await lock.who_holds(agents[region], keys.DRILL_LOCK)
            if found is not None:
                return found
    return None
