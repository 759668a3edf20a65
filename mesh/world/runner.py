"""Composition of a supervisor: `weir region run NAME --world DIR` in the foreground until told to stop.

Law: the one place where a supervisor's parts are made and put together.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from random import SystemRandom

from mesh import tools
from mesh.clock import SystemClock
from mesh.consul.client import Consul
from mesh.world import facts, files, lock, materials
from mesh.world.consul_config import Version
from mesh.world.desk import Desk
from mesh.world.layout import RegionLayout
from mesh.world.plan import ProcessPlan, Programs, processes
from mesh.world.probes import Probes
from mesh.world.rights import first_steps
from mesh.world.supervisor import Supervisor
from mesh.world.token_first import token_known
from mesh.world.world import World
from regions.cli.errors import Refused, WeirError

GATEWAY_ROLES = {"ingress-gateway": "ingress", "mesh-gateway": "mesh-gateway"}
"""Consul service name of a gateway -> role (mesh.consul.acl) that registers it."""


def run_region(folder: Path, region: str) -> None:
    """Run until SIGTERM, SIGINT or a `shutdown` on the control socket. Refused when it already runs."""
    # Consul keeps the CA's key and all tokens in its raft files and would leave their snapshots open to all.
    os.umask(0o077)
    world = World.load(folder)
    world.address(region)  # says so when the world has no such region
    paths = world.layout.region(region)
    with lock.held(paths.lock) as got:
        if not got:
            pid = lock.holder(paths.lock)
            raise Refused(f"region {region}", f"already runs, supervisor is process {pid}", "weir status")
        files.private_folder(world.layout.runtime)
        tokens = materials.new_tokens(world.spec, region)
        programs = find_programs()
        materials.write(world.spec, paths, tokens, world.secrets, consul_version(programs.consul))
        plans = processes(world.spec, paths, programs, tokens.digests)
        try:
            asyncio.run(_supervise(world, paths, plans, tokens))
        finally:
            facts.write(world.spec, paths, ready=False)


async def _supervise(
    world: World, paths: RegionLayout, plans: tuple[ProcessPlan, ...], tokens: materials.Tokens
) -> None:
    clock, rng = SystemClock(), SystemRandom()
    address = world.address(paths.name).consul_http
    async with AsyncExitStack() as stack:

        async def client(token: str) -> Consul:
            return await stack.enter_async_context(Consul(address, token, clock=clock, rng=rng))

        consul = await client(world.secrets.management)
        gateways = {name: await client(world.token_of(role)) for name, role in GATEWAY_ROLES.items()}
        probes = Probes(consul)
        steps = first_steps(world, paths.name, consul)
        desk = Desk(world.spec, paths, tokens.digests, consul, gateways, steps)
        supervisor = Supervisor(
            plans,
            paths.log,
            probes,
            desk,
            lambda ready: facts.write(world.spec, paths, ready=ready),
            clock=clock,
            rng=rng,
        )
        for sign in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(sign, supervisor.shutdown)
        try:
            await token_known(world, paths.name, clock)
            await supervisor.run(paths.control_socket)
        finally:
            await probes.close()


def find_programs() -> Programs:
    """Raises WeirError naming the tool that is missing and the way out."""
    if shutil.which("setpriv") is None:
        raise WeirError("setpriv", "not found; it ties processes to their supervisor", "install util-linux")
    return Programs(str(tools.find("consul")), str(tools.find("envoy")), weir_command())


def weir_command() -> tuple[str, ...]:
    """How to start another `weir` of this very installation."""
    beside = Path(sys.executable).parent / "weir"
    if os.access(beside, os.X_OK):
        return (str(beside),)
    return (sys.executable, "-c", "from regions.cli.root import main; main()")


def consul_version(binary: str) -> Version:
    """Version of a Consul binary. Raises WeirError when it can't tell."""
    env = tools.run_env("consul")
    done = subprocess.run(
        [binary, "version"], capture_output=True, text=True, env=env, timeout=30, check=False
    )
    found = re.search(r"v(\d+)\.(\d+)\.(\d+)", done.stdout)
    if found is None:
        raise WeirError(binary, f"doesn't tell its version: {done.stdout or done.stderr!r}", "weir doctor")
    major, minor, patch = map(int, found.groups())
    return major, minor, patch
