"""Registration in virtual time, against an agent that forgets, dies, freezes and is slow."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.consul import register
from mesh.consul.answers import Answer
from mesh.consul.errors import ConsulError, NoLeader, Unreachable, classify
from services.registration import CALL_S, LEAVE_S, MAX_RETRY_S, TICK_S, Drain, Registration, quiet, retry_s
from tests.virtual import run

IT = register.Instance(
    service="chat",
    id="chat-stable-0",
    region="us-east-1",
    zone="a",
    stage="stable",
    version="7",
    model="echo-1",
    tenant_class="",
    address="127.107.1.10",
    port=9000,
    xds_token_sha256="ab" * 32,
)
SIDECAR = register.sidecar_id(IT.id)


class LoopClock:
    """The loop's own (virtual) time."""

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()

    def time(self) -> float:
        return 1.8e9 + self.monotonic()

    async def sleep(self, s: float) -> None:
        await asyncio.sleep(s)


@dataclass
class FakeAgent:
    """As a 1.8 agent does it: plain 404 for an unknown service; a body registers both services."""

    held: dict[str, dict[str, Any]] = field(default_factory=dict)
    log: list[tuple[float, str]] = field(default_factory=list)
    error: ConsulError | None = None
    frozen: bool = False
    slow_s: float = 0.0
    calls: int = 0

    async def _call(self, what: str) -> None:
        self.calls += 1
        if self.frozen:
            await asyncio.Event().wait()
        await asyncio.sleep(self.slow_s)
        if self.error is not None:
            raise self.error
        self.log.append((asyncio.get_running_loop().time(), what))

    async def register(self, body: Mapping[str, Any]) -> None:
        await self._call(f"register {body['Meta']['lifecycle']}")
        self.held[body["ID"]] = {key: body[key] for key in ("Address", "Port", "Meta")}
        self.held[body["ID"] + "-sidecar-proxy"] = dict(body["Connect"]["SidecarService"])

    async def deregister(self, service_id: str) -> None:
        await self._call("deregister")
        self.held.pop(service_id, None)
        self.held.pop(service_id + "-sidecar-proxy", None)

    async def get(self, path: str) -> Answer:
        await self._call("get")
        service_id = path.rpartition("/")[2]
        if service_id not in self.held:
            raise classify(404, f"GET {path}", f"unknown service ID: {service_id}")
        return Answer(0, self.held[service_id])

    def writes(self) -> list[tuple[float, str]]:
        return [entry for entry in self.log if entry[1] != "get"]

    def lifecycle(self) -> str:
        return str(self.held[IT.id]["Meta"]["lifecycle"])


DOWN = Unreachable(0, "agent", "connection refused")


def made(agent: FakeAgent, it: register.Instance = IT) -> Registration:
    return Registration(agent, it, LoopClock(), Random(1))


async def after(s: float, act: Callable[[], Any]) -> None:
    await asyncio.sleep(s)
    act()


async def living(agent: FakeAgent, seconds: float, *acts: tuple[float, Callable[[], Any]]) -> Registration:
    registration = made(agent)
    tasks = [asyncio.create_task(registration.run())]
    tasks += [asyncio.create_task(after(s, act)) for s, act in acts]
    await asyncio.sleep(seconds)
    for task in tasks:
        task.cancel()
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert not [end for end in ends if isinstance(end, Exception)]
    return registration


def test_registered_once_and_then_only_looked_at() -> None:
    agent = FakeAgent()
    registration = run(living(agent, 30.5))
    assert [what for _, what in agent.writes()] == ["register ready"]
    assert set(agent.held) == {IT.id, SIDECAR}
    assert registration.known
    assert agent.calls <= 62


@pytest.mark.parametrize("lost", [(IT.id, SIDECAR), (IT.id,), (SIDECAR,)])
def test_what_the_agent_lost_is_back_within_two_seconds(lost: tuple[str, ...]) -> None:
    agent = FakeAgent()

    def lose() -> None:
        for service_id in lost:
            del agent.held[service_id]

    run(living(agent, 10, (4.3, lose)))
    assert [what for _, what in agent.writes()] == ["register ready"] * 2
    assert agent.writes()[1][0] - 4.3 <= TICK_S


@pytest.mark.parametrize(
    ("service_id", "change"),
    [
        (IT.id, {"Port": 1}),
        (IT.id, {"Address": "127.0.0.9"}),
        (IT.id, {"Meta": {"lifecycle": "ready", "version": "6"}}),
        (SIDECAR, {"Port": 1}),
        (SIDECAR, {"Meta": {"xds_token_sha256": "old"}}),
    ],
)
def test_what_somebody_changed_is_put_right(service_id: str, change: dict[str, Any]) -> None:
    agent = FakeAgent()
    run(living(agent, 5, (1.5, lambda: agent.held[service_id].update(change))))
    assert len(agent.writes()) == 2
    assert agent.held[service_id] == {**agent.held[service_id], **_wanted(service_id)}


def _wanted(service_id: str) -> dict[str, Any]:
    body = register.instance(IT)
    part = body if service_id == IT.id else body["Connect"]["SidecarService"]
    return {key: part[key] for key in ("Address", "Port", "Meta")}


def test_what_an_earlier_run_left_is_replaced_though_it_looks_the_same() -> None:
    """Its check may be critical; registering anew starts it as passing."""
    agent = FakeAgent()
    run(made(agent).tick())
    run(made(agent).tick())
    assert [what for _, what in agent.writes()] == ["register ready"] * 2


@pytest.mark.parametrize(
    "error", [DOWN, NoLeader(500, "agent", "No cluster leader"), classify(403, "x", "no")]
)
def test_an_agent_that_is_down_is_tried_until_it_is_back(error: ConsulError) -> None:
    agent = FakeAgent(error=error)

    def back() -> None:
        agent.error = None

    registration = run(living(agent, 130, (120.0, back)))
    assert agent.writes()[0][0] - 120 <= MAX_RETRY_S
    assert registration.known
    assert agent.calls < 120 / (MAX_RETRY_S / 2) + 10 + 24, "the tries are spread out"


def test_an_agent_that_freezes_holds_nothing_up_for_long() -> None:
    agent = FakeAgent(frozen=True)

    def thaw() -> None:
        agent.frozen = False

    run(living(agent, 60, (12.0, thaw)))
    assert agent.writes()[0][0] - 12 <= CALL_S + MAX_RETRY_S


def test_draining_stands_in_consul_before_anything_is_waited_for_and_streams_finish() -> None:
    agent, flying = FakeAgent(), [1]

    async def main() -> tuple[int, float]:
        registration = made(agent)
        await registration.tick()
        finish = asyncio.create_task(after(3.0, lambda: flying.__setitem__(0, 0)))
        left = await registration.drain(Drain(10, 0.5), lambda: flying[0])
        now = asyncio.get_running_loop().time()
        assert agent.lifecycle() == "draining"
        await registration.leave()
        await finish
        return left, now

    left, now = run(main())
    assert left == 0
    assert 3.5 <= now <= 3.7
    assert [what for _, what in agent.writes()] == ["register ready", "register draining", "deregister"]
    assert agent.writes()[1][0] == 0.0
    assert agent.held == {}


def test_a_pause_between_requests_is_not_the_end_of_them() -> None:
    flying = [0]

    async def main() -> float:
        comings = [asyncio.create_task(after(s, lambda n=n: flying.__setitem__(0, n)))  # type: ignore[misc]
                   for s, n in ((0.3, 1), (0.6, 0), (1.0, 1), (1.2, 0))]  # fmt: skip
        await made(FakeAgent()).drain(Drain(10, 0.5), lambda: flying[0])
        assert all(task.done() for task in comings)
        return asyncio.get_running_loop().time()

    assert 1.6 <= run(main()) <= 1.9


@pytest.mark.parametrize(
    "agent", [FakeAgent(), FakeAgent(error=DOWN), FakeAgent(frozen=True), FakeAgent(slow_s=3)]
)
def test_a_drain_never_lasts_longer_than_its_deadline(agent: FakeAgent) -> None:
    async def main() -> float:
        registration = made(agent)
        assert await registration.drain(Drain(8, 0.5), lambda: 2) == 2
        assert asyncio.get_running_loop().time() == pytest.approx(8.0)
        await registration.leave()
        return asyncio.get_running_loop().time()

    assert run(main()) <= 8 + LEAVE_S + 0.01


def test_a_drain_begun_while_consul_is_away_is_told_when_it_is_back() -> None:
    agent = FakeAgent(error=DOWN)

    async def main() -> None:
        registration = made(agent)
        keeping = asyncio.create_task(registration.run())
        back = asyncio.create_task(after(2.0, lambda: setattr(agent, "error", None)))
        await registration.drain(Drain(6, 0.5), lambda: 1)
        assert agent.lifecycle() == "draining"
        keeping.cancel()
        await asyncio.wait((keeping, back))

    run(main())
    assert [what for _, what in agent.writes()] == ["register draining"]


@given(slow_s=st.floats(0.0, 0.4), start_s=st.floats(0.0, 3.0))
def test_no_ready_arrives_after_draining_and_nothing_after_leaving(slow_s: float, start_s: float) -> None:
    agent = FakeAgent(slow_s=slow_s)

    async def main() -> None:
        registration = made(agent)
        keeping = asyncio.create_task(registration.run())
        await asyncio.sleep(start_s)
        await registration.drain(Drain(10, 0.2), lambda: 0)
        await registration.leave()
        await asyncio.sleep(5)  # the loop is left running on purpose
        keeping.cancel()
        await asyncio.wait((keeping,))

    run(main())
    told = [what for _, what in agent.writes()]
    assert told[-2:] == ["register draining", "deregister"]
    assert told.count("register draining") == 1
    assert agent.held == {}


def test_leaving_a_consul_that_is_down_is_no_error() -> None:
    agent = FakeAgent(error=DOWN)
    registration = made(agent)
    run(registration.leave())
    assert registration.gone


def test_quiet_at_once_needs_no_wait() -> None:
    async def main() -> float:
        assert await quiet(Drain(5, 0.0), lambda: 0, LoopClock()) == 0
        return asyncio.get_running_loop().time()

    assert run(main()) == 0.0


@given(failures=st.integers(1, 10_000), seed=st.integers(0, 99))
def test_back_off_is_bounded(failures: int, seed: int) -> None:
    assert 0.0 < retry_s(failures, Random(seed)) <= MAX_RETRY_S


def test_what_it_becomes_is_told_now_and_again_after_the_agent_forgot() -> None:
    async def test() -> None:
        agent = FakeAgent()
        registration = made(agent)
        await registration.tick()
        registration.place("GPU-1")
        assert await registration.become("asleep", slept_at=1_800_000_000)
        meta = agent.held[IT.id]["Meta"]
        assert (meta["lifecycle"], meta["slept_at"], meta["device"]) == ("asleep", "1800000000", "GPU-1")
        assert agent.held[SIDECAR]["Meta"]["lifecycle"] == "asleep", "what the mesh reads"
        agent.held.clear()
        await registration.tick()
        assert agent.lifecycle() == "asleep"
        assert await registration.become("ready")
        assert "slept_at" not in agent.held[IT.id]["Meta"]
        assert agent.held[IT.id]["Meta"]["device"] == "GPU-1"

    run(test())


@pytest.mark.parametrize("agent", [FakeAgent(error=DOWN), FakeAgent(frozen=True)])
def test_what_consul_could_not_be_told_is_told_when_it_answers(agent: FakeAgent) -> None:
    async def test() -> None:
        registration = made(agent)
        assert not await registration.become("draining")
        assert registration.lifecycle == "draining"
        agent.error, agent.frozen = None, False
        await registration.tick()
        assert agent.lifecycle() == "draining"

    run(test())


def test_one_that_leaves_says_draining_to_its_end() -> None:
    async def test() -> None:
        agent = FakeAgent()
        registration = made(agent)
        await registration.become("asleep", slept_at=5)
        await registration.drain(Drain(1.0, 0.1), lambda: 0)
        assert agent.lifecycle() == "draining"
        await registration.become("ready")
        assert agent.lifecycle() == "draining", "a wake that ends late must not bring traffic back"

    run(test())
