"""A stand-in for `weir region up | down`, for the module's own contract: calls are recorded, a process is
started that is as long-lived as a region, and the files are left that the real command leaves.

Run as a program by Terraform; its first line is put in by the test. Needs WEIR_STAND_IN_CALLS.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

# An orphan of a broken test must end by itself; longer than any test may take.
LIFE_S = 600
GONE_S = 60


def main(arguments: list[str]) -> int:
    with Path(os.environ["WEIR_STAND_IN_CALLS"]).open("a") as calls:
        calls.write(json.dumps({"argv": arguments, "cwd": str(Path.cwd())}) + "\n")
    room, verb, name, flag, world = arguments
    assert (room, flag) == ("region", "--world")
    folder = Path(world) / "regions" / name
    if verb == "up":
        return up(folder, name)
    down(folder)
    return 0


def up(folder: Path, name: str) -> int:
    if os.environ.get("WEIR_STAND_IN_FAILS"):
        sys.stderr.write("error: port 8500 is taken\n")
        return 1
    folder.mkdir(parents=True, exist_ok=True)
    code = f"import time; time.sleep({LIFE_S})"
    quiet = subprocess.DEVNULL
    region = subprocess.Popen(
        [sys.executable, "-c", code, "region", "run", name],
        stdin=quiet,
        stdout=quiet,
        stderr=quiet,
        start_new_session=True,
    )
    (folder / "supervisor.lock").write_text(f"{region.pid}\n")
    facts = {"name": name, "consul": "http://127.20.1.1:8500", "ingress": "https://127.20.1.3:8443"}
    (folder / "region.json").write_text(json.dumps({**facts, "ca_file": f"{folder}/ca.pem"}))
    region.returncode = 0  # it outlives us on purpose; without this Python warns of it
    return 0


def down(folder: Path) -> None:
    lock = folder / "supervisor.lock"
    if lock.exists():
        kill(int(lock.read_text()))
        lock.unlink()
    (folder / "region.json").unlink(missing_ok=True)


def kill(pid: int) -> None:
    """Returns when it is dead: a signal takes effect only when the process gets a processor."""
    try:
        victim = os.pidfd_open(pid)
    except ProcessLookupError:
        return  # gone already, which is what was wanted
    try:
        signal.pidfd_send_signal(victim, signal.SIGKILL)
        assert select.select([victim], [], [], GONE_S)[0], f"{pid} outlived SIGKILL"
    finally:
        os.close(victim)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
