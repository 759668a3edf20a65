"""Verbs for the operator of one instance, on a loopback port of their own.

Law: each verb is one call on the pool; nothing is decided here. A verb that failed is never answered with
200: its status follows from the outcome's code, and the body says how far it came.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from aiohttp import web

from regions.cli.errors import WeirError
from services.devices.door import find
from services.faults import DeviceLost
from services.lifecycle import State
from services.pool.hotstart import HotPool
from services.pool.steps import Outcome

_STATUS = {
    "": 200,
    "level": 400,
    "device": 400,
    "wrong_state": 409,
    "busy": 409,
    "still_running": 409,
    "consul": 503,
    "no_room": 503,
}
FAILED = 500


def admin_app(drain: Callable[[], None], pool: HotPool) -> web.Application:
    """POST /drain (leave the mesh, finish, exit), POST /sleep?level=1 (0: engine closed), POST
    /wake?device=UUID, GET /state, GET /snapshot (404 before the first sleep)."""

    async def on_drain(_: web.Request) -> web.Response:
        drain()
        return web.json_response(await state(pool) | {"draining": True})

    async def on_sleep(request: web.Request) -> web.Response:
        level = request.query.get("level", "1")
        if not level.isdecimal() or len(level) > 1:
            return web.json_response({"error": f"level {level[:20]!r} is no level"}, status=400)
        return await _said(pool, await pool.sleep(int(level)))

    async def on_wake(request: web.Request) -> web.Response:
        return await _said(pool, await pool.wake(request.query.get("device", "")))

    async def on_state(_: web.Request) -> web.Response:
        return web.json_response(await state(pool))

    async def on_snapshot(_: web.Request) -> web.Response:
        if not pool.memory.raw:
            return web.json_response({"error": "it has not slept yet"}, status=404)
        return web.Response(body=pool.memory.raw, content_type="application/octet-stream")

    app = web.Application()
    app.router.add_post("/drain", on_drain)
    app.router.add_post("/sleep", on_sleep)
    app.router.add_post("/wake", on_wake)
    app.router.add_get("/state", on_state)
    app.router.add_get("/snapshot", on_snapshot)
    return app


async def _said(pool: HotPool, outcome: Outcome) -> web.Response:
    body = await state(pool) | {"outcome": told(outcome)}
    if not outcome.ok:
        body["error"] = outcome.error
    return web.json_response(body, status=_STATUS.get(outcome.code, FAILED))


def told(outcome: Outcome) -> dict[str, Any]:
    """An outcome as JSON has it; seconds rounded to microseconds."""
    body = asdict(outcome) | {"ok": outcome.ok, "seconds": round(outcome.seconds, 6)}
    body["steps"] = [asdict(step) | {"seconds": round(step.seconds, 6)} for step in outcome.steps]
    return body


async def state(pool: HotPool) -> dict[str, Any]:
    """Where the instance stands. Memory is bytes; `memory.held` and `memory.asleep` are of the last sleep."""
    parts = pool.parts
    instance, life, stats = parts.instance, parts.instance.lifecycle, parts.engine.stats()
    facts = parts.engine.facts()
    return {
        "instance": instance.identity.instance,
        "lifecycle": life.state,
        "why": life.why,
        "leaving": life.leaving,
        "draining": life.state is State.DRAINING or life.leaving,
        "asleep": life.state in (State.ASLEEP, State.COLD),
        "dead": life.dead,
        "in_flight": instance.in_flight,
        "running": stats.running,
        "waiting": stats.waiting,
        "tokens": stats.tokens,
        "engine": {"name": facts.name, "sleep_levels": list(facts.sleep_levels), "dead": stats.dead},
        "cold_starts": parts.engine.renewals,
        "device": await _device(pool),
        "memory": {
            "now": stats.memory_bytes,
            "held": pool.memory.held,
            "asleep": pool.memory.asleep,
        },
        "slept_at": pool.slept_at or None,
        "snapshot_bytes": len(pool.memory.raw),
        "last": told(pool.last) if pool.last else None,
    }


async def _device(pool: HotPool) -> dict[str, Any] | None:
    devices, uuid = pool.parts.devices, pool.parts.engine.binding.uuid
    if devices is None or not uuid:
        return None
    try:
        found = find(await asyncio.to_thread(devices.list), uuid)
    except (WeirError, DeviceLost) as error:
        return {"uuid": uuid, "lost": str(error)}
    if found is None:
        return {"uuid": uuid, "lost": "it doesn't answer"}
    return {
        "uuid": uuid,
        "kind": devices.kind,
        "name": found.name,
        "load": round(found.load, 4),
        "memory_total": found.memory_total,
        "memory_used": found.memory_used,
    }
