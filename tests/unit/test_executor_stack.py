"""The whole stack behind the server (scheduler, sim engine): faults as they really come, clients that leave,
clocks that jump, and that everything is free again afterwards."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import struct
from random import Random
from typing import Any

import aiohttp
import pytest

from mesh.clock import SystemClock
from services.batching.model import BatchingSettings
from services.batching.scheduled import Scheduled
from services.engines.sim import SimEngine
from services.sim_cost import SimOptions
from tests.fakes.loop_clock import LoopClock
from tests.unit.executor import TEXT, TEXT_PATH, Running, running, served
from tests.virtual import leap

FAST = {"step_ms": 0.5, "seq_ms": 0.0, "prefill_ms_per_token": 0.0}
LONG = TEXT | {"max_tokens": 4000}
IDLE_S = 60.0


OURS = ("weir", "aiohttp", "asyncio")
"""Who may log of a request; an exporter of an earlier test may have something to say too."""
SLOW = {"step_ms": 20.0}
"""LONG lasts longer than any test."""


def stack(how: BatchingSettings | None = None, **options: Any) -> Scheduled:
    """On the loop's clock, which a test may put forward."""
    clock = LoopClock()
    engine = SimEngine(SimOptions(**{**FAST, **options}), clock=clock)
    return Scheduled(engine, how or BatchingSettings(retries=0), clock)


def empty(it: Running) -> bool:
    stats = it.instance.engine.stats()
    return (stats.running, stats.waiting, stats.kv_used, it.instance.in_flight) == (0, 0, 0.0, 0)


ILL = {
    "nan": ({"nan_after": 3}, "bad_logits"),
    "oom": ({"oom_at_step": 3}, "out_of_memory"),
    "hang": ({"hang_after": 3}, "engine_hung"),
    "death": ({"die_after": 3}, "engine_dead"),
    "device lost": ({"lost_at_step": 3}, "device_lost"),
}


@pytest.mark.parametrize("name", ILL)
def test_an_engine_that_fails_in_the_middle_cuts_its_streams_and_holds_nothing(name: str) -> None:
    options, code = ILL[name]

    async def test(it: Running) -> None:
        asked = asyncio.gather(*(it.cut(TEXT_PATH, LONG | {"seed": n}) for n in range(4)))
        if name == "hang":
            await it.until(lambda: it.instance.tally.tokens == 12)
            leap(IDLE_S)
        bodies = await asked
        assert [events[-1]["error"]["code"] for events in bodies] == [code] * 4
        assert {len(events) for events in bodies} == {4}, "three tokens and the error"
        await it.until(lambda: empty(it))
        lost = name in ("death", "device lost", "hang")  # four that hang are an engine that is stuck
        assert await it.status("/health") == (503 if lost else 200)
        if name == "oom":
            assert (await it.post(TEXT_PATH, TEXT))[0] == 200, "it goes on"

    served(test, engine=stack(BatchingSettings(retries=0, idle_s=IDLE_S), **options))


@pytest.mark.parametrize("name", ["nan", "oom", "death"])
def test_before_the_first_token_it_is_a_503(name: str) -> None:
    options = dict.fromkeys(ILL[name][0], 0)

    async def test(it: Running) -> None:
        status, said = await it.post(TEXT_PATH, LONG | {"stream": True})
        assert (status, said["error"]["code"]) == (503, ILL[name][1])
        await it.until(lambda: empty(it))

    served(test, engine=stack(**options))


def test_a_full_queue_is_a_429_that_says_why_and_when() -> None:
    async def test(it: Running) -> None:
        work = [asyncio.create_task(it.read(TEXT_PATH, LONG)) for _ in range(3)]
        await it.until(lambda: it.instance.engine.stats().waiting == 2)
        status, said = await it.post(TEXT_PATH, TEXT)
        assert (status, said["error"]["code"]) == (429, "queue_full")
        assert float(it.last["retry-after-ms"]) > 0
        assert it.sample("weir_batching_refusals_total", code="queue_full") == 1
        for task in work:
            task.cancel()
        await it.until(lambda: empty(it))

    served(test, engine=stack(BatchingSettings(queue_limit=2), slots=1, **SLOW))


def test_a_deadline_passes_in_the_queue() -> None:
    async def test(it: Running) -> None:
        work = asyncio.create_task(it.read(TEXT_PATH, LONG))
        await it.until(lambda: it.instance.engine.stats().running == 1)
        asked = asyncio.create_task(it.post(TEXT_PATH, TEXT, {"x-weir-deadline-ms": "10000"}))
        await it.until(lambda: it.instance.engine.stats().waiting == 1)
        leap(10)
        status, said = await asked
        assert (status, said["error"]["code"]) == (408, "deadline_passed")
        assert it.instance.engine.stats().waiting == 0
        work.cancel()
        await it.until(lambda: empty(it))

    served(test, engine=stack(slots=1, **SLOW))


def _reset(it: Running, body: dict[str, Any], read: int) -> None:
    """A client that asks, reads so many bytes and resets its connection."""
    host, _, port = it.base.removeprefix("http://").partition(":")
    raw = json.dumps(body).encode()
    with socket.create_connection((host, int(port))) as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        line.sendall(
            b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (TEXT_PATH.encode(), len(raw))
        )
        line.sendall(raw)
        while read > 0:
            read -= len(line.recv(read))


@pytest.mark.parametrize("n", [1, 4])
def test_clients_that_vanish_leave_nothing_and_no_traceback(n: int, caplog: pytest.LogCaptureFixture) -> None:
    async def test(it: Running) -> None:
        body = LONG | {"stream": True, "n": n}
        await asyncio.gather(*(asyncio.to_thread(_reset, it, body, 500) for _ in range(6)))
        await it.until(lambda: empty(it))
        assert it.sample("weir_executor_requests_total", code="499") == 6
        assert it.sample("vllm:request_success_total", finished_reason="abort") == 6 * n
        assert (await it.post(TEXT_PATH, TEXT))[0] == 200

    with caplog.at_level(logging.WARNING):
        served(test, engine=stack(**SLOW))
    assert not [row for row in caplog.records if row.name.startswith(OURS)]


class Jumping(SystemClock):
    """Wall time that somebody sets back by a day and forth by a year; monotonic time goes on."""

    def __init__(self) -> None:
        self.off = 0.0

    def time(self) -> float:
        return super().time() + self.off


@pytest.mark.parametrize("jump_s", [-86_400.0, 31_536_000.0])
def test_a_wall_clock_that_jumps_changes_nothing_but_what_it_says(jump_s: float) -> None:
    clock = Jumping()
    engine = Scheduled(SimEngine(SimOptions(**FAST), clock=clock), BatchingSettings(), clock)

    async def main() -> None:
        async with running(engine, clock=clock) as it:
            soon = {"x-weir-deadline-ms": "60000"}
            _, before = await it.post(TEXT_PATH, TEXT, soon)
            stream = asyncio.create_task(it.stream(TEXT_PATH, TEXT | {"max_tokens": 200}, soon))
            await it.until(lambda: engine.stats().running == 1)
            clock.off = jump_s
            assert (await stream)[-1] == "[DONE]"
            _, after = await it.post(TEXT_PATH, TEXT, soon)
            assert after["created"] - before["created"] == pytest.approx(jump_s, abs=60)
            assert 0 <= it.sample("vllm:e2e_request_latency_seconds_sum") < 60

    asyncio.run(main())


@pytest.mark.parametrize("seed", range(3))
def test_whatever_a_crowd_does_nothing_is_left_and_everything_is_counted(seed: int) -> None:
    """Whole and streamed, one and several choices, tenants of all classes, deadlines, clients that leave."""
    rng = Random(seed)
    tenants = ["gold-demo", "silver-demo", "bronze-demo", "nobody", ""]

    async def client(it: Running) -> None:
        body = TEXT | {
            "n": rng.choice([1, 1, 3]),
            "max_tokens": rng.randint(1, 60),
            "seed": rng.randint(0, 9),
        }
        headers = {"x-weir-tenant": rng.choice(tenants)}
        if rng.random() < 0.3:
            headers["x-weir-deadline-ms"] = str(rng.randint(1, 80))
        patience = rng.choice([None, None, rng.uniform(0.001, 0.05)])
        try:
            async with asyncio.timeout(patience):
                await it.read(TEXT_PATH, body | {"stream": rng.random() < 0.6}, headers)
        except (TimeoutError, aiohttp.ClientError):
            pass  # it left, or its stream was cut at its deadline

    async def test(it: Running) -> None:
        await asyncio.gather(*(client(it) for _ in range(60)))
        await it.until(lambda: empty(it))
        assert it.sample("weir_executor_requests_total") <= 60
        codes = {
            sample.labels["code"]
            for family in it.instance.registry.collect()
            if family.name == "weir_executor_requests"
            for sample in family.samples
            if sample.name.endswith("_total")
        }
        assert codes <= {"200", "408", "429", "499"}
        assert it.sample("weir_executor_tokens_total") == it.sample("vllm:generation_tokens_total")
        assert it.sample("weir_batching_submitted_total") >= it.sample("weir_batching_placed_total")
        assert (await it.post(TEXT_PATH, TEXT))[0] == 200

    served(test, engine=stack(BatchingSettings(queue_limit=40), slots=8))
