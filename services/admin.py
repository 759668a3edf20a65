"""Verbs for the operator of one instance, on a loopback port of their own.

Law: each verb is one call on the instance or its engine; nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web

from services.instance import Instance
from services.lifecycle import State


def admin_app(drain: Callable[[], None], instance: Instance) -> web.Application:
    """POST /drain (leave the mesh, finish, exit), POST /sleep, POST /wake, GET /state."""

    async def on_drain(_: web.Request) -> web.Response:
        drain()
        return web.json_response(_state(instance) | {"draining": True})

    async def on_sleep(_: web.Request) -> web.Response:
        try:
            await instance.sleep()
        except RuntimeError as error:
            return web.json_response(_state(instance) | {"error": str(error)}, status=409)
        return web.json_response(_state(instance))

    async def on_wake(_: web.Request) -> web.Response:
        await instance.wake()
        return web.json_response(_state(instance))

    async def state(_: web.Request) -> web.Response:
        return web.json_response(_state(instance))

    app = web.Application()
    app.router.add_post("/drain", on_drain)
    app.router.add_post("/sleep", on_sleep)
    app.router.add_post("/wake", on_wake)
    app.router.add_get("/state", state)
    return app


def _state(instance: Instance) -> dict[str, object]:
    stats = instance.engine.stats()
    return {
        "lifecycle": instance.lifecycle.state,
        "draining": instance.lifecycle.state is State.DRAINING,
        "asleep": instance.lifecycle.state is State.ASLEEP,
        "dead": instance.dead,
        "in_flight": instance.in_flight,
        "running": stats.running,
        "waiting": stats.waiting,
        "tokens": stats.tokens,
    }
