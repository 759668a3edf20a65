"""Breaking parts of a running world while load flows through it.

Law: whatever is broken here is mended in `finally`, and the block ends only when the region says it is ready
again. Time passes by load sent, never by sleeping; nothing is judged but by `Load.unharmed`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import threading
from collections.abc import Iterator

import psutil

from drills.load import Request, Sample, open_loop
from mesh.world.control import SupervisorGone
from mesh.world.process import ProcessStatus, State
from tests.e2e.mesh_world import MeshWorld, failures

MENDED_S = 60.0
TIMEOUT_S = 150.0
"""Of one request. The longest stream, 32,768 tokens, takes 40 s alone and 57 s beside 15 busy processes."""


class Load:
    """Open-loop completions in a thread of their own. samples: what has ended so far, in order of its end."""

    def __init__(
        self,
        world: MeshWorld,
        rate: float,
        regions: tuple[str, ...],
        body: tuple[bool, int],
        seconds: float,
    ) -> None:
        self.samples: list[Sample] = []
        self._world, self._rate, self._seconds = world, rate, seconds
        self._stream, tokens = body
        self._urls = [world.world.address(r).ingress_https for r in regions or world.names]
        self._body = json.dumps(
            {"prompt": "deep water", "max_tokens": tokens, "stream": self._stream}
        ).encode()
        self._sent = 0
        self._over = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="load", daemon=True)

    def lasts(self, seconds: float) -> None:
        """Returns when load has been sent for so long from now on."""
        goal = self._sent + round(seconds * self._rate)
        self._world.until(f"{seconds:g} s of load sent", lambda: self._sent >= goal, seconds * 3 + 20)

    def unharmed(self) -> None:
        """Not one request failed; the error tells which did."""
        lost = [(s.index, s.url, s.region, s.stage, s.attempts, s.error) for s in failures(self.samples)]
        assert self.samples, "no load, no proof"
        assert not lost, f"{len(lost)} of {len(self.samples)} failed: {lost[:10]}"

    def since(self, index: int) -> list[Sample]:
        """What was sent as number `index` or later and has ended."""
        return [s for s in self.samples if s.index >= index]

    @property
    def sent(self) -> int:
        return self._sent

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """Send no more, wait for every answer. Raises what broke the generator."""
        self._over = True
        self._thread.join(TIMEOUT_S + 20)
        assert not self._thread.is_alive(), "the generator outlived every deadline"
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            asyncio.run(self._send())
        except BaseException as error:
            self._error = error

    async def _send(self) -> None:
        stop = asyncio.Event()

        def make(index: int) -> Request:
            self._sent = index + 1
            if self._over:
                stop.set()  # this one is still sent
            return Request("/chat/v1/completions", {}, self._body, self._stream)

        await open_loop(
            self._urls,
            self._rate,
            self._seconds,
            ca_file=self._world.world.ca_file,
            make_request=make,
            on_sample=self.samples.append,
            stop=stop,
            timeout_s=TIMEOUT_S,
        )


@contextlib.contextmanager
def under_load(
    world: MeshWorld,
    rate: float = 40.0,
    *,
    regions: tuple[str, ...] = (),
    stream: bool = False,
    tokens: int = 1,
    seconds: float = 600.0,
) -> Iterator[Load]:
    """Load through the ingresses of these regions (all) while the block lasts, for `seconds` at most.

    The block is left with every request answered.
    """
    load = Load(world, rate, regions, (stream, tokens), seconds)
    load.start()
    try:
        load.lasts(min(1.0, seconds))
        yield load
    finally:
        load.end()


def process(world: MeshWorld, region: str, name: str) -> ProcessStatus:
    return world.world.control(region).status()[name]


def pid_of(world: MeshWorld, region: str, name: str) -> int:
    pid = process(world, region, name).pid
    assert pid is not None, f"{name} of {region} doesn't run"
    return pid


def mended(world: MeshWorld, region: str) -> None:
    """Wait until everything of the region runs and every instance passes its checks in Consul."""

    def ready() -> bool:
        with contextlib.suppress(SupervisorGone):  # busy, and not gone: it answers later
            seen = world.world.control(region).region()
            return seen.ready and all(p.state is State.READY for p in seen.processes.values())
        return False

    world.until(f"{region} ready again", ready, MENDED_S)
    world.until(f"all instances of {region} passing", lambda: critical(world, region) == set(), MENDED_S)


def critical(world: MeshWorld, region: str) -> set[str] | None:
    """Services of the region with a check that doesn't pass; None while Consul can't tell."""
    code, body = world.consul(region, "GET", f"/v1/health/state/any?dc={region}")
    if code != 200:
        return None
    return {check["ServiceID"] for check in json.loads(body) if check["Status"] != "passing"}


def kill(world: MeshWorld, region: str, name: str) -> None:
    """SIGKILL, and wait until its supervisor has a new one that is ready."""
    old = pid_of(world, region, name)
    os.kill(old, signal.SIGKILL)

    def again() -> bool:
        with contextlib.suppress(SupervisorGone):
            seen = process(world, region, name)
            return seen.state is State.READY and seen.pid != old
        return False

    world.until(f"another {name} of {region} is ready", again, MENDED_S)


@contextlib.contextmanager
def held(world: MeshWorld, region: str, name: str, sign: str = "KILL") -> Iterator[None]:
    """A process killed and kept down for the length of the block."""
    world.world.control(region).hold(name, sign)
    try:
        yield
    finally:
        world.world.control(region).release(name)
        mended(world, region)


@contextlib.contextmanager
def frozen(world: MeshWorld, region: str, name: str) -> Iterator[None]:
    """A process that keeps its ports and does nothing for the length of the block."""
    victim = psutil.Process(pid_of(world, region, name))
    victim.suspend()
    try:
        yield
    finally:
        victim.resume()  # psutil refuses when the number belongs to another process by now
        mended(world, region)
