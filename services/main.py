"""The executor process: one instance, wired here and nowhere else.

Law: composition root. SIGTERM drains and ends with 0; a second one ends at once.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from mesh.clock import SystemClock
from mesh.consul import register
from mesh.consul.client import Consul
from regions.cli.errors import UsageError, WeirError
from services.engines import make_engine
from services.instance import Identity, Instance
from services.registration import Registration
from services.server import Listener, Server, admin_app

log = logging.getLogger("weir.executor")


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
    drain_deadline_s: float = 10.0
    debug: bool = False


def address(text: str, what: str) -> tuple[str, int]:
    """(host, port) of `host:port`. Raises UsageError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UsageError(f"{what} {text!r}", "not host:port", "for example 127.0.0.1:9000")
    return host, int(port)


async def serve(settings: Settings) -> None:
    """Run until SIGTERM or SIGINT; drain; leave."""
    stop = _Stop()
    engine = make_engine(settings.engine, settings.options)
    await engine.start()
    clock, instance = SystemClock(), Instance(settings.identity, engine)
    listeners = [
        Listener(Server(instance, clock, debug=settings.debug).app(), *address(settings.listen, "--listen"))
    ]
    if settings.admin:
        listeners.append(Listener(admin_app(stop.asked.set, instance), *address(settings.admin, "--admin")))
    try:
        for listener in listeners:
            await _bind(listener, settings)
        await _registered(settings, instance, clock, stop)
    finally:
        for listener in listeners:
            await listener.stop()


class _Stop:
    """asked: drain and end. now: end at once."""

    def __init__(self) -> None:
        self.asked, self.now = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signal)

    def _signal(self) -> None:
        (self.now if self.asked.is_set() else self.asked).set()


async def _bind(listener: Listener, settings: Settings) -> None:
    try:
        await listener.start()
    except OSError as error:
        where = f"executor {settings.identity.instance} on {settings.listen}"
        raise WeirError(
            where, error.strerror or str(error), "free the port or choose another --listen"
        ) from error


async def _registered(settings: Settings, instance: Instance, clock: SystemClock, stop: _Stop) -> None:
    sys.stdout.write(
        json.dumps({"ready": True, "instance": settings.identity.instance, "pid": os.getpid()}) + "\n"
    )
    sys.stdout.flush()
    if not settings.consul:
        await stop.asked.wait()
        return
    async with Consul.from_env(address=settings.consul, clock=clock) as consul:
        registration = Registration(consul, _row(settings), clock)
        keeping = asyncio.create_task(registration.run())
        await stop.asked.wait()
        instance.draining = True
        drain = registration.drain(instance.idle, settings.drain_deadline_s, lambda: instance.in_flight)
        await _first(drain, stop.now)
        keeping.cancel()
        await registration.leave()


async def _first(work: object, event: asyncio.Event) -> None:
    """Until `work` is done or `event` is set."""
    tasks = {asyncio.ensure_future(work), asyncio.ensure_future(event.wait())}  # type: ignore[call-overload]
    _, rest = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in rest:
        task.cancel()


def _row(settings: Settings) -> register.Instance:
    who = settings.identity
    host, port = address(settings.listen, "--listen")
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
