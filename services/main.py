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
import sys
from dataclasses import replace
from pathlib import Path

from mesh.clock import Clock, SystemClock
from mesh.consul.client import Consul
from regions.cli.errors import UsageError
from services import restore, tenants_file
from services.admin import admin_app
from services.assembly import Stack, assemble
from services.checked import address
from services.devices.claims import claimed, claims_folder
from services.devices.door import MIG, Binding, Devices, find
from services.devices.here import at_start
from services.devices.host import CPU
from services.ending import Stop, goodbye, unless
from services.engine import Engine
from services.faults import DeviceLost
from services.instance import Instance
from services.lifecycle import Lifecycle, State
from services.listener import Listener
from services.models.store import find as find_model
from services.pool import metrics as pool_metrics
from services.pool.hotstart import HotPool
from services.pool.keeper import Agent
from services.pool.parts import Herald, Nobody, Parts
from services.pool.renewable import Renewable
from services.pool.watch import watchers
from services.registration import LEAVE_S, Drain, Registration, quiet
from services.server import Edge, Server
from services.settings import Settings, row
from services.starting import refuse_taken, started, taken
from services.telemetry import spans
from services.telemetry.trace import from_environment

log = logging.getLogger("weir.executor")

ON_DEVICES = ("torch", "vllm")
"""Engines that run on a GPU where there is one."""
HURRY_S = 0.5
"""Longest goodbye to Consul after the second SIGTERM."""


async def serve(settings: Settings) -> None:
    """Run until SIGTERM or SIGINT; drain; leave. Raises UsageError, WeirError when it can't start."""
    stop, clock = Stop(), SystemClock()
    devices, binding = _place(settings)
    engine = Renewable(lambda where: _engine(settings.stack, where, clock), binding)
    instance = Instance(settings.identity, engine, Lifecycle())
    async with contextlib.AsyncExitStack() as stack:
        tracing = from_environment(os.environ, spans.resource(settings.identity))
        stack.push_async_callback(tracing.close)
        stack.callback(devices.close)
        consul = await _consul(settings, clock, stack)
        registration = _registration(settings, clock, consul)
        if settings.device_memory:
            stack.enter_context(_share(settings, devices, binding))
        stack.push_async_callback(goodbye, engine)
        refuse_taken(settings.identity.instance, _addresses(settings))
        if settings.restored is not None:
            await restore.before_start(settings.restored, _model_folder(settings.stack))
        if not await started(engine, stop.asked, clock):
            return
        pool = _pool(settings, instance, engine, clock, registration, devices)
        stack.push_async_callback(pool.close)
        if settings.restored is not None:
            await restore.before_ready(settings.restored, pool)
        instance.lifecycle.to(State.RUNNING)
        pool_metrics.watch(pool, instance.registry)
        watched(pool, consul, clock, stack)
        tenants = settings.tenants or tenants_file.load()
        edge = Edge(tenants=tenants, tracing=tracing, answers=settings.answers)
        server = Server(instance, clock, debug=settings.debug, edge=edge)
        for listener in _listeners(settings, server, pool, stop):
            stack.push_async_callback(listener.stop)
            await _bind(listener, settings.identity.instance)
        stack.push_async_callback(server.end)
        _say_ready(settings)
        if registration is None:
            await _alone(settings.drain, instance, stop, clock)
        else:
            await _registered(registration, settings.drain, instance, stop, server)


def watched(pool: HotPool, agent: Agent | None, clock: Clock, stack: contextlib.AsyncExitStack) -> None:
    """Who sleeps too long goes cold, who is broken is started anew: while the stack is open."""
    for watcher in watchers(pool, agent, clock):
        stack.callback(asyncio.create_task(watcher.run(clock), name=watcher.name).cancel)


def _engine(stack: Stack, where: Binding, clock: Clock) -> Engine:
    """The engine for this place, not started; again after a cold start, on another device after a move."""
    if stack.engine == "torch":
        stack = replace(stack, options={**stack.options, "device": where.torch})
    elif stack.engine == "vllm" and where.torch != CPU:
        # An operator's own list (tensor parallelism) stays while it holds the place that all others hear of.
        named = stack.options.get("device", "")
        device = named if where.uuid in named.split(",") else where.uuid
        stack = replace(stack, options={**stack.options, "device": device})
    return assemble(stack, clock, random.Random())  # noqa: S311 (jitter, no secret)


def _place(settings: Settings) -> tuple[Devices, Binding]:
    """The devices there are, and where the engine starts."""
    engine = settings.stack.engine
    devices, binding = at_start(_wanted(settings), gpu=engine in ON_DEVICES, fake=settings.devices)
    if devices.kind == "fake":
        log.warning("fake devices: %s is pretended, the engine runs on the CPU", binding.uuid)
    if engine == "torch" and binding.torch != CPU:
        _see(binding)
    return devices, binding


def _wanted(settings: Settings) -> str:
    """--device, else the engine's own option of that name; of a list, the first."""
    option = settings.stack.options.get("device", "") if settings.stack.engine in ON_DEVICES else ""
    return settings.device or option.removeprefix("auto").partition(",")[0]


def _see(binding: Binding) -> None:
    """Before CUDA looks: devices by the numbers that NVML gives them; a slice's holder sees it alone."""
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    if binding.uuid.startswith(MIG):
        os.environ.update(binding.environment)


def _share(settings: Settings, devices: Devices, binding: Binding) -> contextlib.AbstractContextManager[None]:
    """Its share of the device's memory, held while it runs. Raises Refused where it doesn't fit."""
    device = find(devices.list(), binding.uuid)
    if device is None:
        raise DeviceLost(f"{binding.uuid} doesn't answer")
    return claimed(claims_folder(), device, settings.device_memory, settings.identity.instance)


def _model_folder(stack: Stack) -> Path | None:
    """Where the model's files are, for the engines that have some."""
    if stack.engine not in ON_DEVICES:
        return None
    try:
        return find_model(stack.model)
    except UsageError:
        return None


def _leave(instance: Instance, how: Drain) -> None:
    log.info("asked to stop: %d in flight, %g s to finish at most", instance.in_flight, how.deadline_s)
    instance.lifecycle.leave()


async def _alone(how: Drain, instance: Instance, stop: Stop, clock: Clock) -> None:
    await stop.asked.wait()
    _leave(instance, how)
    # Nobody is told, so there is no news to wait for.
    at_once = Drain(how.deadline_s, 0.0)
    await unless(stop.now, asyncio.ensure_future(quiet(at_once, lambda: instance.in_flight, clock)))


async def _registered(
    registration: Registration, how: Drain, instance: Instance, stop: Stop, server: Server
) -> None:
    keeping = asyncio.create_task(registration.run(), name="registration")
    try:
        # A registration that broke (a bug: its errors are handled) must not leave a server nobody hears of.
        await unless(stop.asked, keeping, cancel=False)
        _leave(instance, how)
        drain = asyncio.ensure_future(registration.drain(how, lambda: instance.in_flight))
        await unless(stop.now, drain)
    finally:
        # First of all: a Consul that doesn't answer must not hold up who waits for tokens.
        await server.end()
        keeping.cancel()
        await asyncio.wait((keeping,))
        await registration.leave(HURRY_S if stop.now.is_set() else LEAVE_S)


async def _consul(settings: Settings, clock: Clock, stack: contextlib.AsyncExitStack) -> Consul | None:
    if not settings.consul:
        return None
    return await stack.enter_async_context(Consul.from_env(address=settings.consul, clock=clock))


def _registration(settings: Settings, clock: Clock, consul: Consul | None) -> Registration | None:
    if consul is None:
        return None
    return Registration(consul, row(settings), clock, random.Random())  # noqa: S311 (jitter, no secret)


def _pool(
    settings: Settings,
    instance: Instance,
    engine: Renewable,
    clock: Clock,
    registration: Registration | None,
    devices: Devices,
) -> HotPool:
    file = Path(settings.run_dir) / f"{settings.identity.instance}.snapshot" if settings.run_dir else None
    # Where nobody is told there is no news to wait for.
    drain = settings.drain if registration is not None else Drain(settings.drain.deadline_s, 0.0)
    herald: Herald = Nobody() if registration is None else registration
    herald.place(engine.binding.uuid)
    return HotPool(
        Parts(
            instance=instance,
            engine=engine,
            clock=clock,
            herald=herald,
            devices=devices,
            recipe=settings.stack.recipe,
            build=lambda recipe, where: _engine(settings.stack.made_from(recipe), where, clock),
            model_folder=_model_folder(settings.stack),
            snapshot_file=file,
            settings=replace(settings.pool, drain=drain),
            slices=settings.stack.engine == "vllm",
        )
    )


def _addresses(settings: Settings) -> list[tuple[str, int]]:
    """The service's, then the admin door's."""
    given = (("--listen", settings.listen), ("--admin", settings.admin))
    return [address(text, flag) for flag, text in given if text]


def _listeners(settings: Settings, server: Server, pool: HotPool, stop: Stop) -> list[Listener]:
    apps = (server.app(), admin_app(stop.asked.set, pool))
    return [Listener(app, *where) for app, where in zip(apps, _addresses(settings), strict=False)]


async def _bind(listener: Listener, name: str) -> None:
    try:
        await listener.start()
    except OSError as error:
        raise taken(name, str(listener), error) from error


def _say_ready(settings: Settings) -> None:
    line = {"ready": True, "instance": settings.identity.instance, "listen": settings.listen}
    sys.stdout.write(json.dumps(line | {"pid": os.getpid()}) + "\n")
    sys.stdout.flush()
