"""A real `weir executor` of one's own: `with executor("127.107.1.10", "--debug") as it: ...`

Law: whatever is started here dies with the test: killed in finally, and by the kernel (PDEATHSIG) if the
test process goes first. Addresses are the caller's; pick a 127.107.y.z that no other test uses.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

READY_TIMEOUT_S = 200.0
WAIT_S = 60.0
WEIR = str(Path(sys.executable).parent / "weir")
PORT = 9000


def until(what: str, holds: Callable[[], Any], within_s: float = WAIT_S) -> Any:
    """Poll with a deadline; gives the first true value."""
    deadline = time.monotonic() + within_s
    while not (value := holds()):
        assert time.monotonic() < deadline, f"not within {within_s} s: {what}"
        time.sleep(0.01)
    return value


class Stream:
    """A streamed answer being read. `take(n)` reads n events, `rest()` to the end."""

    def __init__(self, ip: str, body: Mapping[str, Any]) -> None:
        self._http = http.client.HTTPConnection(ip, PORT, timeout=WAIT_S)
        self._http.request("POST", "/v1/completions", json.dumps({"stream": True, **body}))
        self._answer = self._http.getresponse()
        assert self._answer.status == 200
        self.seen = b""

    def take(self, count: int) -> None:
        for _ in range(2 * count):
            self.seen += self._answer.readline()

    def rest(self) -> bytes:
        """All that came. Raises http.client.IncompleteRead or ConnectionError when the stream was cut."""
        self.seen += self._answer.read()
        return self.seen

    def close(self) -> None:
        self._answer.close()
        self._http.close()


class Executor:
    """One process. Its stderr is in `log`."""

    def __init__(self, process: subprocess.Popen[bytes], ip: str, log: Path) -> None:
        self.process, self.ip, self.log = process, ip, log
        self.streams: list[Stream] = []

    def ready_line(self) -> dict[str, Any]:
        """The one line on stdout; fails with the log when the process ends without it."""
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], READY_TIMEOUT_S)
        line = self.process.stdout.readline() if readable else b""
        assert line, f"no ready line:\n{self.log.read_text()[-2000:]}"
        body: dict[str, Any] = json.loads(line)
        return body

    def get(self, path: str) -> int:
        return self.ask("GET", path)[0]

    def ask(self, method: str, path: str, body: Any = None, port: int = PORT) -> tuple[int, Any]:
        with contextlib.closing(http.client.HTTPConnection(self.ip, port, timeout=WAIT_S)) as conn:
            conn.request(method, path, json.dumps(body) if body is not None else None)
            answer = conn.getresponse()
            raw = answer.read()
        with contextlib.suppress(ValueError):
            return answer.status, json.loads(raw)
        return answer.status, raw.decode()

    def running(self) -> float:
        """Requests in flight by its own metrics."""
        _, text = self.ask("GET", "/metrics")
        [line] = [x for x in text.splitlines() if x.startswith("weir_executor_in_flight ")]
        return float(line.split()[1])

    def stream(self, **body: Any) -> Stream:
        """A streamed answer; closed with the executor at the latest."""
        self.streams.append(Stream(self.ip, {"prompt": "hi", "max_tokens": 20} | body))
        return self.streams[-1]

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def ended(self, within_s: float = WAIT_S) -> int:
        return self.process.wait(timeout=within_s)


@contextlib.contextmanager
def executor(
    folder: Path, ip: str, *options: str, env: Mapping[str, str] | None = None, wait: bool = True
) -> Iterator[Executor]:
    """Start on ip:9000, wait for the ready line (unless told not to), give it out, kill it."""
    log = folder / f"executor-{ip}.log"
    fixed = ("--instance", "chat-stable-0", "--stage", "stable", "--region", "us-east-1", "--zone", "a")
    argv = [WEIR, "executor", *fixed, "--version", "7", "--model", "echo-1", "--listen", f"{ip}:{PORT}"]
    with log.open("ab") as err:
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *argv, *options],
            stdout=subprocess.PIPE,
            stderr=err,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **(env or {})},
        )
    it = Executor(process, ip, log)
    try:
        if wait:
            it.ready_line()
        yield it
    finally:
        process.kill()
        process.wait(timeout=60)
        for stream in it.streams:
            stream.close()
        assert process.stdout is not None
        process.stdout.close()
