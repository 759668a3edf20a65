"""What a report was made with: versions of weir, Envoy, Consul, Python, the kernel.

Law: asks the programs themselves and shows their own words; decides nothing.
"""

from __future__ import annotations

import asyncio
import platform
from importlib.metadata import version

from mesh import tools


async def versions() -> dict[str, str]:
    """By name, for people."""
    found = {"weir": version("weir")}
    for name in ("envoy", "consul"):
        spec = tools.TOOLS[name]
        found[name] = await _first_line(str(tools.find(name)), *spec.version_args)
    kernel = f"{platform.system()} {platform.release()}"
    return found | {"Python": platform.python_version(), "kernel": kernel}


async def _first_line(program: str, *args: str) -> str:
    """What a program says of its version, shortened from the left (paths)."""
    pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(
        program, *args, stdin=null, stdout=pipe, stderr=asyncio.subprocess.STDOUT
    )
    out, _ = await process.communicate()
    lines = [line.strip() for line in out.decode(errors="replace").splitlines() if line.strip()]
    return lines[0][-120:] if lines else "unknown"
