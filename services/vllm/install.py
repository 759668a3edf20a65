"""Sees to the interpreter that vLLM runs in, from a loop that must stay free to stop.

Law: installs in a child process of its own (venv.py as a program, on a leash): who is told to stop in the
middle of a download of gigabytes stops then and not after it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from mesh.extras import pins
from regions.cli.errors import WeirError
from services.vllm import venv
from services.vllm.process import LEASH


async def interpreter(python: str, say: Callable[[str], None]) -> venv.Found:
    """python: of an environment that has vLLM; empty for our own one, made if it isn't there. Raises
    WeirError."""
    if python:
        return await asyncio.to_thread(venv.look, Path(python).expanduser())
    lock = venv.lock_text()
    folder = venv.place(pins(lock)[venv.PACKAGE])
    if not venv.ready(folder, lock):
        await _install(say)
    return venv.Found(folder / "bin" / "python")


async def _install(say: Callable[[str], None]) -> None:
    program = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", str(LEASH), sys.executable, "-m", "services.vllm.install"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=Path(__file__).resolve().parents[2],
        process_group=0,
    )
    assert program.stdout is not None, "asked for above"
    assert program.stdin is not None, "asked for above"
    try:
        async for line in program.stdout:
            said = json.loads(line)
            if "error" in said:
                raise WeirError(*said["error"])
            say(said["say"])
        if status := await program.wait():
            raise WeirError("vLLM", f"its installation ended with status {status}", "weir setup --with vllm")
    finally:
        program.stdin.close()
        with contextlib.suppress(ProcessLookupError):
            program.send_signal(signal.SIGTERM)
        await program.wait()


def main() -> int:
    """One JSON object a line: {"say": text}, or at the end {"error": [what, why, way out]}."""
    try:
        venv.ensure(lambda text: print(json.dumps({"say": text}), flush=True))
    except WeirError as error:
        print(json.dumps({"error": [error.what, error.why, error.way_out]}), flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
