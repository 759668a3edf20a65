"""What a client sees when an engine fails: before the first token a status, after it a cut stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from services.engine import EngineStats, GenerateRequest, Token
from services.faults import (
    BadLogits,
    DeadlinePassed,
    DeviceLost,
    EngineDied,
    EngineHung,
    OutOfDeviceMemory,
    Refused,
)
from tests.sse import events
from tests.unit.executor import CHAT, CHAT_PATH, TEXT, TEXT_PATH, Running, served
from tests.unit.scripted import HANG, Scripted
from tests.virtual import leap

FULL = Refused(429, "queue_full", "32 requests wait already", retry_after_s=0.3)
FAULTS: list[tuple[Exception, int, str]] = [
    (EngineDied("broken"), 503, "engine_dead"),
    (DeviceLost("gone"), 503, "device_lost"),
    (EngineHung("nothing for 60 s"), 503, "engine_hung"),
    (OutOfDeviceMemory("step 7"), 503, "out_of_memory"),
    (BadLogits("NaN"), 503, "bad_logits"),
    (DeadlinePassed("too late"), 408, "deadline_passed"),
    (RuntimeError("the engine sleeps"), 503, "engine_error"),
    (KeyError("a bug with a secret"), 500, "engine_error"),
    (FULL, 429, "queue_full"),
    (Refused(503, "draining", "ends soon"), 503, "draining"),
    (Refused(400, "kv_never_fits", "9 blocks", param="max_tokens"), 400, "kv_never_fits"),
]


@pytest.mark.parametrize(("fault", "status", "code"), FAULTS, ids=lambda value: str(value)[:20])
@pytest.mark.parametrize("streams", [True, False])
def test_before_the_first_token_a_fault_is_a_status(
    fault: Exception, status: int, code: str, streams: bool
) -> None:
    async def test(it: Running) -> None:
        got, said = await it.post(CHAT_PATH, CHAT | {"stream": streams})
        assert (got, said["error"]["code"]) == (status, code)
        kinds = {4: "invalid_request_error", 5: "server_error", 408: "timeout_error", 429: "rate_limit_error"}
        assert said["error"]["type"] == kinds.get(status, kinds[status // 100])
        assert "secret" not in said["error"]["message"]
        assert it.sample("weir_executor_requests_total", code=str(status)) == 1
        assert it.sample("vllm:request_success_total", finished_reason="abort") == 1

    served(test, engine=Scripted([fault]))


@pytest.mark.parametrize(("fault", "status", "code"), FAULTS, ids=lambda value: str(value)[:20])
def test_after_it_an_event_says_so_and_the_connection_is_cut(
    fault: Exception, status: int, code: str
) -> None:
    async def test(it: Running) -> None:
        *tokens, last = await it.cut(TEXT_PATH, TEXT)
        assert [one["choices"][0]["text"] for one in tokens] == ["a", "b"]
        assert last["error"]["code"] == code
        assert it.sample("weir_executor_streams_cut_total") == 1

    served(test, engine=Scripted(["a", "b", fault]))


def test_a_refusal_for_now_says_when_to_come_again() -> None:
    async def test(it: Running) -> None:
        await it.post(TEXT_PATH, TEXT)
        assert (it.last["Retry-After"], it.last["retry-after-ms"]) == ("1", "300")

    served(test, engine=Scripted([FULL]))


class Refuses(Scripted):
    """Everything, before anything is queued."""

    def size(self, request: GenerateRequest) -> int:
        raise Refused(400, "bad_token_id", "id 70000; the vocabulary has 65536", param="prompt")


def test_what_can_be_refused_before_work_is() -> None:
    engine = Refuses(["a"])

    async def test(it: Running) -> None:
        status, said = await it.post(TEXT_PATH, TEXT | {"prompt": [70_000]})
        assert (status, said["error"]["param"], said["error"]["code"]) == (400, "prompt", "bad_token_id")
        assert not engine.seen

    served(test, engine=engine)


def test_only_a_dead_engine_fails_the_instance() -> None:
    async def test(it: Running) -> None:
        await it.post(TEXT_PATH, TEXT)
        assert await it.status("/health") == 200
        engine.dies = True
        await it.post(TEXT_PATH, TEXT)
        assert (await it.status("/health"), await it.status("/ready")) == (503, 503)
        assert it.sample("model_health_status") == 0.0
        assert (await it.post(TEXT_PATH, TEXT))[0] == 503
        assert len(engine.seen) == 2, "a dead engine is asked no more"

    engine = Scripted([EngineDied("broken")])
    served(test, engine=engine)


def test_health_hears_of_a_dead_engine_without_a_request() -> None:
    engine = Scripted(["a"])

    async def test(it: Running) -> None:
        assert await it.status("/health") == 200
        assert it.sample("model_health_status") == 1.0
        engine.told = EngineStats(dead="the device is lost")
        assert (await it.status("/health"), await it.status("/ready")) == (503, 503)
        assert it.sample("model_health_status") == 0.0

    served(test, engine=engine)


# -- deadlines ----------------------------------------------

IN_S = 60
SOON = {"x-weir-deadline-ms": "60000"}
ENVOY = {"x-envoy-expected-rq-timeout-ms": "60000"}


LATE = (408, "deadline_passed", "false")
"""The request's time is over: neither Envoy nor OpenAI's clients try it again."""
TRY = (504, "try_timeout", None)
"""This try's time is over: it may go better elsewhere."""


@pytest.mark.parametrize(
    ("headers", "verdict"),
    [
        (SOON, LATE),
        (SOON | {"x-envoy-expected-rq-timeout-ms": "90000"}, LATE),
        (SOON | ENVOY, LATE),
        (ENVOY, TRY),
        (ENVOY | {"x-weir-deadline-ms": "90000"}, TRY),
    ],
)
@pytest.mark.parametrize(("streams", "script"), [(True, [HANG]), (False, [HANG]), (False, ["a", HANG])])
def test_a_deadline_ends_a_request_that_has_said_nothing(
    headers: dict[str, str], verdict: tuple[int, str, str | None], streams: bool, script: list[Any]
) -> None:
    engine = Scripted(script)

    async def test(it: Running) -> None:
        asked = asyncio.create_task(it.post(TEXT_PATH, TEXT | {"stream": streams}, headers))
        await it.until(lambda: engine.hangs == 1)
        leap(IN_S)
        status, said = await asked
        assert (status, said["error"]["code"], it.last.get("x-should-retry")) == verdict
        assert engine.running == 0

    served(test, engine=engine)


def test_a_deadline_of_the_caller_cuts_a_stream_under_way() -> None:
    engine = Scripted(["a", HANG])

    async def test(it: Running) -> None:
        *_, last = await it.cut(TEXT_PATH, TEXT, SOON, then=lambda _: leap(IN_S))
        assert last["error"]["code"] == "deadline_passed"
        assert engine.running == 0

    served(test, engine=engine)


class Slow(Scripted):
    """Holds all but the first token back until `go`."""

    go: asyncio.Event

    async def start(self) -> None:
        self.go = asyncio.Event()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Token, None]:
        async for token in super().generate(request):
            yield token
            await self.go.wait()


def test_envoys_limit_of_a_try_is_for_the_first_byte_and_cuts_no_stream() -> None:
    async def test(it: Running) -> None:
        async with it.http.post(it.base + TEXT_PATH, json=TEXT | {"stream": True}, headers=ENVOY) as answer:
            begun = await answer.content.readuntil(b"\n\n")
            leap(2 * IN_S)
            engine.go.set()
            assert events(begun + await answer.read())[-1] == "[DONE]"
        assert engine.seen[0].deadline_s is None
        engine.go.clear()
        asked = asyncio.create_task(it.post(TEXT_PATH, TEXT, ENVOY))
        await it.until(lambda: engine.running == 1)
        leap(IN_S)
        assert (await asked)[0] == 504, "a whole answer is its first byte"
        assert engine.seen[1].deadline_s == IN_S

    engine = Slow(list("abcdef"))
    served(test, engine=engine)


@pytest.mark.parametrize("said", ["0", "-5"])
def test_a_deadline_that_has_passed_is_refused_before_work(said: str) -> None:
    engine = Scripted(["a"])

    async def test(it: Running) -> None:
        assert (await it.post(TEXT_PATH, TEXT, {"x-weir-deadline-ms": said}))[0] == 408
        assert not engine.seen

    served(test, engine=engine)


# -- what stands in the headers ----------------------------------------------


def test_headers_say_who_answered_and_why() -> None:
    async def test(it: Running) -> None:
        await it.post(TEXT_PATH, TEXT, {"x-request-id": "abc-1"})
        assert (it.last["x-weir-engine"], it.last["x-weir-fallback"]) == ("scripted", "queue_full")
        assert it.last["x-request-id"] == "abc-1"
        await it.stream(TEXT_PATH, TEXT)
        assert (it.last["x-weir-engine"], it.last["x-weir-fallback"]) == ("scripted", "queue_full")
        assert it.last["x-request-id"].startswith("req-")
        await it.post(TEXT_PATH, b"{", {"x-request-id": "a b\tc"})
        assert it.last["x-request-id"].startswith("req-"), "not what may stand in a log"
        assert "x-weir-engine" not in it.last
        assert it.last["endpoint-load-metrics"].startswith("TEXT ")

    served(test, engine=Scripted(["a"], fallback="queue_full"))


def test_tenant_and_class_come_from_the_table_alone() -> None:
    async def test(it: Running) -> None:
        for name in ("gold-demo", "nobody-knows", ""):
            headers = {"x-weir-tenant": name, "x-weir-tenant-class": "gold"} if name else {}
            assert (await it.post(TEXT_PATH, TEXT, headers))[0] == 200
        assert [(job.tenant, job.tenant_class) for job in engine.seen] == [
            ("gold-demo", "gold"),
            ("default", "silver"),
            ("default", "silver"),
        ]
        for label in ("gold-demo", "other", "default"):
            assert it.sample("vllm:generation_tokens_total", tenant=label) == 1

    engine = Scripted(["a"])
    served(test, engine=engine)


def test_chance_is_an_argument_and_only_asked_where_it_matters() -> None:
    async def test(it: Running) -> None:
        free = {"prompt": "hi", "n": 2}
        for body in (free, free, free | {"temperature": 0}, free | {"seed": -3}):
            assert (await it.post(TEXT_PATH, body))[0] == 200
        seeds = [{job.seed for job in engine.seen[i : i + 2]} for i in range(0, 8, 2)]
        assert [len(one) for one in seeds] == [1, 1, 1, 1], "one seed for all samples of a request"
        assert seeds[0] != seeds[1]
        assert seeds[2:] == [{0}, {2**63 - 3}]

    engine = Scripted(["a"])
    served(test, engine=engine)
