"""Figures of the engines inside an engine: queues of both sides of a fallback, reasons, upstream metrics."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from services.batching.model import BatchingSettings
from services.batching.scheduled import Scheduled
from services.engine import EngineFacts, GenerateRequest, Token
from services.fallback.engine import FallbackEngine
from services.faults import OutOfDeviceMemory
from services.telemetry.inside import layers, upstream_metrics
from tests.unit.executor import CHAT, CHAT_PATH, TEXT, TEXT_PATH, Running, served
from tests.unit.scripted import Scripted

FACTS = EngineFacts("first", "echo-1", context=100, sequences=4)
NEXT = EngineFacts("second", "echo-1", context=100, sequences=4)


class Server(Scripted):
    """One with a server behind it."""

    def upstream_metrics(self) -> str:
        return f"# TYPE {self.facts().name}_thing gauge\n{self.facts().name}_thing 1.0\n"


class Wrapper(Scripted):
    """Passes the call on, as a wrapper may."""

    def __init__(self, inner: Server) -> None:
        super().__init__()
        self.inner = inner

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Token, None]:
        return self.inner.generate(request)

    def upstream_metrics(self) -> str:
        return self.inner.upstream_metrics()


def stack(first: Scripted, second: Scripted) -> FallbackEngine:
    how = BatchingSettings(retries=0, classes=("gold", "silver", "bronze"))
    return FallbackEngine(Scheduled(first, how), Scheduled(second, how))


def test_layers_are_found_with_their_roles() -> None:
    first, second = Scripted(["a"], facts=FACTS), Scripted(["b"], facts=NEXT)
    roles = [(role, type(one).__name__) for role, one in layers(stack(first, second))]
    assert roles == [
        ("primary", "FallbackEngine"),
        ("primary", "Scheduled"),
        ("primary", "Scripted"),
        ("secondary", "Scheduled"),
        ("secondary", "Scripted"),
    ]


def test_upstream_metrics_come_once_however_many_pass_them_on() -> None:
    both = FallbackEngine(Wrapper(Server(facts=FACTS)), Scheduled(Server(facts=NEXT)))
    text = upstream_metrics(both)
    assert text.count("first_thing 1.0") == text.count("second_thing 1.0") == 1


def test_an_answer_by_the_second_engine_says_so_and_both_queues_are_counted() -> None:
    first = Scripted([OutOfDeviceMemory("x")], facts=FACTS)
    second = Scripted(["b"], facts=NEXT)

    async def test(it: Running) -> None:
        assert (await it.post(TEXT_PATH, TEXT, {"x-weir-tenant": "bronze-demo"}))[0] == 200
        assert it.last["x-weir-fallback"] == "engine_error"
        assert it.last["x-weir-engine"] == "scripted"
        for role, engine in (("primary", "first"), ("secondary", "second")):
            where = {"role": role, "engine": engine, "region": "westeurope"}
            assert it.sample("weir_batching_submitted_total", **where) == 1
            assert it.sample("vllm:request_queue_time_seconds_count", **where) == 1
        too_long = TEXT | {"max_tokens": 101, "prompt": "x" * 20}
        assert (await it.post(TEXT_PATH, too_long))[0] == 400
        text = await it.metrics()
        assert "weir_engine_batching" not in text
        assert "weir_fallback_" in text
        names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
        assert len(names) == len(set(names))

    served(test, engine=stack(first, second))


def test_a_chat_without_a_length_stays_with_a_primary_of_a_short_context() -> None:
    """What the door gives it (4096 tokens here) is no wish of the client's: it is no long sequence."""
    short, long = EngineFacts("first", "echo-1", context=100), EngineFacts("second", "echo-1", context=10**5)
    first, second = Scripted(["a"], facts=short), Scripted(["b"], facts=long)

    async def test(it: Running) -> None:
        assert (await it.post(CHAT_PATH, {"messages": CHAT["messages"]}))[0] == 200
        assert "x-weir-fallback" not in it.last
        assert [job.max_tokens for job in first.seen] == [100 - len("user: hi")]
        assert not second.seen
        await it.post(CHAT_PATH, CHAT | {"max_tokens": 4096})
        assert it.last["x-weir-fallback"] == "sequence_length"

    served(test, engine=stack(first, second))
