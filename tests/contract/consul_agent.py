"""A real Consul agent of one's own: `with consul_agent(folder, "127.102.1.1", "us-east-1") as agent: ...`

Law: whatever a test starts here dies with it: killed in finally, and by the kernel (PDEATHSIG) if the
test process goes first. Addresses are the caller's; pick a 127.102.y.z that no other test uses.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mesh.tools import find

READY_TIMEOUT_S = 60.0
MASTER_TOKEN = "6d2f4bb8-0000-4000-8000-00000000feed"
"""Management token of test agents started with acl=True; secret of nothing."""

# Death is noticed in about 2 s instead of up to 30 s (Consul's WAN defaults are for long distances).
FAST_GOSSIP = {
    "probe_interval": "500ms",
    "probe_timeout": "250ms",
    "gossip_interval": "100ms",
    "suspicion_mult": 2,
}


class Agent:
    """One agent process. `restart` keeps the data folder."""

    def __init__(self, folder: Path, ip: str, dc: str, config: Mapping[str, Any]) -> None:
        self.folder, self.ip, self.dc = folder, ip, dc
        self.http = f"http://{ip}:8500"
        self.token: str = config.get("acl", {}).get("tokens", {}).get("master", "")
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "agent.json").write_text(json.dumps(config))

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        assert self._process is None
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", str(find("consul")), "agent"]  # noqa: RUF005 (one thing)
                + ["-config-file", str(self.folder / "agent.json")],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Until there is a leader who answers, and the CA is ready; else fail with the end of the log."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self._process is not None and self._process.poll() is not None:
                raise AssertionError(f"agent {self.dc} ended by itself:\n{self.log_tail()}")
            if self._leader():
                return
            time.sleep(0.05)
        raise AssertionError(f"agent {self.dc} not ready in {timeout_s} s:\n{self.log_tail()}")

    def _leader(self) -> bool:
        try:
            # A consistent read needs the leader, and with ACLs the token, to be in force.
            self.call("GET", "/v1/session/list?consistent")
            return self.ca_ready()
        except (urllib.error.URLError, OSError, ValueError):
            return False

    def ca_ready(self) -> bool:
        body = self.call("GET", "/v1/connect/ca/roots")
        return bool(body and body.get("Roots"))

    def call(self, method: str, path: str, data: bytes | None = None, timeout_s: float = 30.0) -> Any:
        """One plain request with the agent's management token, for arranging a test."""
        request = urllib.request.Request(self.http + path, data=data, method=method)
        if self.token:
            request.add_header("X-Consul-Token", self.token)
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            body = answer.read()
        with contextlib.suppress(ValueError):
            return json.loads(body)
        return body

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """As a crash: no leave, no goodbye. Fine on one that is dead."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait(timeout=60)

    def restart(self, *, wait: bool = True) -> None:
        self.kill()
        self.start()
        if wait:
            self.wait_ready()

    def log_tail(self, lines: int = 25) -> str:
        text = (self.folder / "log").read_text(errors="replace")
        return "\n".join(text.splitlines()[-lines:])


def config_of(folder: Path, ip: str, dc: str, primary: str | None, join_wan: Sequence[str]) -> dict[str, Any]:
    config: dict[str, Any] = {
        "datacenter": dc,
        "node_name": dc,
        "server": True,
        "bootstrap_expect": 1,
        "data_dir": str(folder / "data"),
        "bind_addr": ip,
        "client_addr": ip,
        "ports": {"dns": -1, "grpc": -1, "http": 8500, "server": 8300, "serf_lan": 8301, "serf_wan": 8302},
        "connect": {"enabled": True},
        "performance": {"raft_multiplier": 1},
        "gossip_wan": FAST_GOSSIP,
        "disable_update_check": True,
        "leave_on_terminate": False,
        "log_level": "warn",
        "retry_join_wan": list(join_wan),
        "retry_interval_wan": "1s",
    }
    return config | ({"primary_datacenter": primary} if primary else {})


@contextlib.contextmanager
def consul_agent(
    folder: Path,
    ip: str,
    dc: str,
    *,
    primary: str | None = None,
    join_wan: Sequence[str] = (),
    acl: bool = False,
    extra: Mapping[str, Any] | None = None,
) -> Iterator[Agent]:
    """Start, wait until it serves, give it out, kill it.

    primary: name of the primary datacenter (None: this one alone). acl: default_policy deny, with
    MASTER_TOKEN as management token and agent token. extra: goes over the configuration.
    """
    config = config_of(folder, ip, dc, primary, join_wan)
    if acl:
        config["acl"] = {
            "enabled": True,
            "default_policy": "deny",
            "down_policy": "extend-cache",
            "enable_token_replication": primary not in (None, dc),
            "tokens": dict.fromkeys(("master", "agent", "replication"), MASTER_TOKEN),
        }
        config["primary_datacenter"] = primary or dc
    agent = Agent(folder, ip, dc, config | dict(extra or {}))
    try:
        agent.start()
        agent.wait_ready()
        yield agent
    finally:
        agent.kill()
