"""A running world as a test talks to it: the plain Consul HTTP API, the weir command, the ingress.

Law: talks to a world from outside, as its users do; waits by polling with a deadline, never by sleeping.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from drills.load import Request, Sample, open_loop
from mesh import tools
from mesh.world import strays
from mesh.world.runner import weir_command
from mesh.world.world import World

REPO = Path(__file__).parents[2]
DEADLINE_S = 60.0
"""Guards against hanging; no promise of the product is this long."""
CANARY = "config/traffic/canary-weight"


class Result:
    """What a command did."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class MeshWorld:
    """folder: the world's; `world`: its description."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.world = World.load(folder)
        self.names = self.world.regions.names

    def weir(self, *args: str, timeout_s: float = 120.0) -> Result:
        done = subprocess.run(
            [*weir_command(), *args, "--dir", str(self.folder)],
            cwd=REPO,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        return Result(done.returncode, done.stdout, done.stderr)

    def consul(self, region: str, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        """A plain HTTP call to the region's agent, as curl would make it."""
        url = self.world.address(region).consul_http + path
        request = urllib.request.Request(url, data=body, method=method)
        if self.world.token:
            request.add_header("X-Consul-Token", self.world.token)
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def consul_cli(self, region: str, *args: str) -> Result:
        """The consul command itself, as a person types it."""
        where = self.world.address(region).consul_http
        env = {**os.environ, "CONSUL_HTTP_ADDR": where, "CONSUL_HTTP_TOKEN": self.world.token}
        command = [str(tools.find("consul")), *args]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=30, check=False)
        return Result(done.returncode, done.stdout, done.stderr)

    def put(self, region: str, key: str, value: bytes | str) -> int:
        raw = value.encode() if isinstance(value, str) else value
        return self.consul(region, "PUT", f"/v1/kv/{key}", raw)[0]

    def delete(self, region: str, key: str, query: str = "") -> None:
        self.consul(region, "DELETE", f"/v1/kv/{key}{query}")

    def get(self, region: str, key: str) -> str | None:
        code, body = self.consul(region, "GET", f"/v1/kv/{key}?raw")
        return body.decode() if code == 200 else None

    def document(self, region: str, service: str = "chat") -> dict[str, Any]:
        """The status document of a region, {} when there is none."""
        text = self.get(region, f"status/traffic/{service}/{region}")
        body: dict[str, Any] = json.loads(text) if text else {}
        return body

    def until(self, what: str, probe: Callable[[], Any], deadline_s: float = DEADLINE_S) -> Any:
        """The first true answer of `probe`. AssertionError naming `what` and the last answer."""
        end = time.monotonic() + deadline_s
        while True:
            seen = probe()
            if seen:
                return seen
            if time.monotonic() > end:
                raise AssertionError(
                    f"not so within {deadline_s:g} s: {what}; documents: {self._documents()}"
                )
            time.sleep(0.02)

    def applied(self, canary: float, *, regions: tuple[str, ...] = ()) -> float:
        """Wait until this canary weight is applied in these regions (all). Seconds it took."""
        start = time.monotonic()

        def there() -> bool:
            found = [self.document(r) for r in regions or self.names]
            return all(d and d["canary_weight"]["value"] == canary and d["applied"] for d in found)

        self.until(f"canary {canary} applied", there)
        return time.monotonic() - start

    def load(
        self,
        rate: float,
        seconds: float,
        *,
        regions: tuple[str, ...] = (),
        session: Callable[[int], str] | None = None,
        headers: dict[str, str] | None = None,
        stream: bool = False,
        tokens: int = 1,
    ) -> list[Sample]:
        """Completions through the ingresses of these regions (all)."""
        urls = [self.world.address(r).ingress_https for r in regions or self.names]
        body = json.dumps(
            {"prompt": "how deep is the water", "max_tokens": tokens, "stream": stream}
        ).encode()

        def make(index: int) -> Request:
            key = {"x-session-id": session(index)} if session else {}
            name = key.get("x-session-id", "")
            return Request("/chat/v1/completions", {**key, **(headers or {})}, body, stream, name)

        return asyncio.run(
            open_loop(urls, rate, seconds, ca_file=self.world.ca_file, make_request=make, timeout_s=30)
        )

    def reset(self) -> None:
        """Default traffic, in force everywhere."""
        for region in self.names:
            self.consul(region, "PUT", "/v1/kv/config/traffic/", b"")
        for key in self._config_keys():
            self.delete(self.names[0], key)

        def plain() -> bool:
            found = [self.document(r) for r in self.names]
            return not self._config_keys() and all(
                d
                and d["applied"]
                and not d["refusals"]
                and d["canary_weight"]["value"] == 0
                and not d["evacuated"]
                and d["reason"] == "as configured"
                for d in found
            )

        self.until("default traffic everywhere", plain, 40.0)

    def _config_keys(self) -> set[str]:
        found: set[str] = set()
        for region in self.names:
            code, body = self.consul(region, "GET", "/v1/kv/config/traffic/?keys")
            found |= {k for k in (json.loads(body) if code == 200 else []) if not k.endswith("/")}
        return found

    def _documents(self) -> str:
        return json.dumps({r: self.document(r) for r in self.names})[:4000]


def shares(samples: list[Sample]) -> dict[tuple[str, str], float]:
    """Share of the answers by (region, stage)."""
    count = Counter((s.region, s.stage) for s in samples)
    return {owner: n / len(samples) for owner, n in count.items()}


def stage_share(samples: list[Sample], stage: str) -> float:
    return sum(v for (_, s), v in shares(samples).items() if s == stage)


def failures(samples: list[Sample]) -> list[Sample]:
    return [s for s in samples if not s.ok]


@contextlib.contextmanager
def brought_up(folder: Path, *args: str) -> Iterator[MeshWorld]:
    """`weir up` and, whatever happens, `weir down --purge`."""
    command = [*weir_command(), "up", "--dir", str(folder), "--token-cost-ms", "1", *args]
    try:
        done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr
        yield MeshWorld(folder)
    finally:
        down = [*weir_command(), "down", "--purge", "--dir", str(folder)]
        subprocess.run(down, cwd=REPO, capture_output=True, timeout=120, check=False)
        left = strays.find(folder)
        strays.end(left)
        assert not left, left
