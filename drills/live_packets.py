"""The real packet filter: legacy iptables, one command at a time.

Law: runs the commands it is given, always with `-w` (another program may hold the lock). Legacy on
purpose: nftables may be absent in containers, and mixing both confuses whoever looks.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from mesh import tools
from mesh.world.world import World
from regions.cli.errors import WeirError

TIMEOUT_S = 10.0
CAP_NET_ADMIN = 12


class LivePackets:
    """drills.doors.Packets."""

    def __init__(self, world: World) -> None:
        self._world = world

    def subnet(self, region: str) -> str:
        return self._world.address(region).consul.rsplit(".", 1)[0] + ".0/24"

    async def check(self) -> str:
        if not _may_administer():
            return "setting packet rules needs CAP_NET_ADMIN, which this process lacks"
        try:
            await self.run("-S")
        except WeirError as error:
            return f"{error.what}: {error.why}"
        return ""

    async def run(self, *args: str) -> str:
        program = str(tools.find("iptables"))
        process = await asyncio.create_subprocess_exec(
            program,
            "-w",
            "5",
            *args,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=tools.run_env("iptables"),
        )
        try:
            async with asyncio.timeout(TIMEOUT_S):
                out, errors = await process.communicate()
        except TimeoutError as error:
            process.kill()
            await process.wait()
            raise WeirError(
                program, f"no answer within {TIMEOUT_S:g} s", "see who holds /run/xtables.lock"
            ) from error
        if process.returncode:
            said = errors.decode(errors="replace").strip().splitlines() or ["no reason given"]
            raise WeirError(f"{Path(program).name} {' '.join(args)}", said[0], "run as root")
        return out.decode(errors="replace")


def _may_administer(status: Path = Path("/proc/self/status")) -> bool:
    """Whether this process has CAP_NET_ADMIN in effect."""
    for line in status.read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> CAP_NET_ADMIN & 1)
    return False
