"""The executor process: one instance, wired here and nowhere else.

Law: composition root. SIGTERM drains and ends with 0; a second one ends at once, with 0 too.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import random
import signal
import sys
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from mesh.clock import Clock, SystemClock
from mesh.consul import register
from mesh.consul.client import Consul
from regions.cli.errors import UsageError, WeirError
from services.engines import make_engine
from services.instance import Identity, Instance
from services.listener import Listener
from services.registration import Drain, Registration
from services.server import Server, admin_app

log = logging.getLogger("weir.executor")

HURRY_S = 0.5
"""Longest goodbye to Consul after the second SIGTERM."""
_WILDCARDS = ("0.0.0.0", "::", "[::]")  # noqa: S104 (refused, not bound)


@dataclass(frozen=True, slots=True)
class Settings:
    """What `weir executor` is started with. Addresses are host:port; consul "" means: don't register."""

    identity: Identity
    listen: str
    sidecar: str
    consul: str
    token_sha256: str
    engine: str
    options: Mapping[str, str]
    admin: str = ""
    drain: Drain = Drain()
    debug: bool = False


def address(text: str, what: str) -> tuple[str, int]:
    """(host, port) of `host:port`. Raises UsageError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UsageError(f"{what} {text!r}", "not host:port", "for example 127.0.0.1:9000")
    return host, int(port)


def row(settings: Settings) -> register.Instance:
    """The registration that these settings ask for. Raises UsageError."""
    who = settings.identity
    host, port = address(settings.listen, "--listen")
    if host in _WILDCARDS:
        raise UsageError(f"--listen {settings.listen!r}", "no address others can call", "give the host's own")
    sidecar_host, sidecar_port = address(settings.sidecar, "--sidecar")
    return register.Instance(
        service=who.service,
        id=who.instance,
        region=who.region,
        zone=who.zone,
        stage=who.stage,
        version=who.version,
        model=who.model,
        tenant_class=who.tenant_class,
        address=host,
        port=port,
        xds_token_sha256=settings.token_sha256,
        sidecar_address=sidecar_host,
        sidecar_port=sidecar_port,
    )


async def serve(settings: Settings) -> None:
    """Run until SIGTERM or SIGINT; drain; leave. Raises UsageError, WeirError when it can't start."""
    stop, clock = _Stop(), SystemClock()
    engine = make_engine(settings.engine, settings.options)
    instance = Instance(settings.identity, engine)
    listeners = [
        Listener(Server(instance, clock, debug=settings.debug).app(), *address(settings.listen, "--listen"))
    ]
    if settings.admin:
        listeners.append(Listener(admin_app(stop.asked.set, instance), *address(settings.admin, "--admin")))
    async with contextlib.AsyncExitStack() as stack:
        registration = await _registration(settings, clock, stack)
        await engine.start()
        for listener in listeners:
            stack.push_async_callback(listener.stop)
            await _bind(listener, settings.identity.instance)
        _say_ready(settings)
        keeping = asyncio.create_task(registration.run(), name="registration") if registration else None
        await stop.asked.wait()
        instance.draining = True
        await _drained(registration or _alone(settings, clock), settings, instance, stop)
        if keeping is not None and registration is not None:
            keeping.cancel()
            await asyncio.wait((keeping,))
            await registration.leave(HURRY_S if stop.now.is_set() else LEAVE_S)


class _Stop:
    """asked: drain and end. now: end at once."""

    def __init__(self) -> None:
        self.asked, self.now = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signal)

    def _signal(self) -> None:
        (self.now if self.asked.is_set() else self.asked).set()
