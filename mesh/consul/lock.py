"""A lock over a Consul session and one KV key: one holder, told by name, let go when it dies.

Law: holding it is no proof for ever. `lost` is set when the session is gone; every write done under the
lock should carry the fence (`guard`), so that a holder that slept through its own death writes nothing.
The key stays after release, empty, so that its lock index (the fence) never starts over.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

from mesh.consul.answers import KvEntry, TxnOp
from mesh.consul.client import Consul
from mesh.consul.errors import ConsulError
from regions.cli.errors import Refused

TTL_S = 10.0
"""Consul's smallest. A dead holder's lock is free after 10 to 20 s."""
LOCK_DELAY_S = 0.0
"""No pause after a holder's death: the fence protects what the pause is meant for."""


@dataclass(slots=True)
class Held:
    """A lock in hand. modify_index: as of taking it (the fence); lock_index: how often it was ever taken."""

    key: str
    session: str
    modify_index: int
    lock_index: int
    lost: asyncio.Event = field(default_factory=asyncio.Event)

    def guard(self) -> TxnOp:
        """Put it first into a transaction: nothing is written unless this holder still has the lock."""
        return TxnOp.check_index(self.key, self.modify_index)


@contextlib.asynccontextmanager
async def hold(
    consul: Consul, key: str, holder: Mapping[str, str], *, ttl_s: float = TTL_S
) -> AsyncIterator[Held]:
    """Take the lock or raise Refused naming its holder; release it whatever happens inside.

    holder: who we are, for people (`who`, `why`, `since`, …); stands in the key as JSON while we hold it.
    """
    session = await consul.session_create(ttl_s, LOCK_DELAY_S, name=f"weir lock {key}", behavior="release")
    renewing: asyncio.Task[None] | None = None
    try:
        held = await _acquire(consul, key, session, holder)
        renewing = asyncio.create_task(_renew(consul, held, ttl_s), name=f"renew {key}")
        yield held
    finally:
        if renewing is not None:
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)
        await _let_go(consul, key, session)


async def who_holds(consul: Consul, key: str) -> Mapping[str, str] | None:
    """What the present holder says of itself, or None when the lock is free."""
    entry = await consul.kv_get(key)
    return _holder_of(entry) if entry is not None and entry.session else None


async def _acquire(consul: Consul, key: str, session: str, holder: Mapping[str, str]) -> Held:
    body = json.dumps(dict(holder), sort_keys=True).encode()
    for _ in range(3):
        if await consul.kv_put(key, body, acquire=session):
            entry = await consul.kv_get(key)
            if entry is not None and entry.session == session:
                return Held(key, session, entry.modify_index, entry.lock_index)
        other = await who_holds(consul, key)
        if other is not None:
            raise Refused(
                f"lock {key}",
                "held by " + ", ".join(f"{name} {value}" for name, value in sorted(other.items())),
                "wait until it is done; a holder that died lets go after at most 20 s",
            )
        # Free again between our try and our look.
    raise Refused(f"lock {key}", "taken and let go faster than we could look", "try again")


def _holder_of(entry: KvEntry) -> Mapping[str, str]:
    try:
        body = json.loads(entry.value)
    except ValueError:
        body = None
    if isinstance(body, dict) and body:
        return {str(k): str(v) for k, v in body.items()}
    return {"session": entry.session}


async def _renew(consul: Consul, held: Held, ttl_s: float) -> None:
    """Renew at a third of the ttl. An unreachable Consul is waited out until the ttl is over: then lost."""
    renewed = consul.clock.monotonic()
    while not held.lost.is_set():
        await consul.clock.sleep(ttl_s / 3)
        try:
            alive = await consul.session_renew(held.session)
        except ConsulError:
            alive = consul.clock.monotonic() - renewed < ttl_s
        else:
            renewed = consul.clock.monotonic() if alive else renewed
        if not alive:
            held.lost.set()


async def _let_go(consul: Consul, key: str, session: str) -> None:
    # Shielded, so that Ctrl-C in the middle of the release doesn't leave the lock to its ttl. Release
    # first and with an empty value; destroying the session alone would keep our name in the key.
    async def release() -> None:
        with contextlib.suppress(ConsulError):  # an unreachable Consul frees it by ttl
            await consul.kv_put(key, b"", release=session)
            await consul.session_destroy(session)

    await asyncio.shield(asyncio.ensure_future(release()))
