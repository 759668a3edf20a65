"""The load report: Envoy's grammar, and what the numbers mean."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.engine import EngineFacts, EngineStats
from services.telemetry.orca import SAMPLE_S, WINDOW_S, Counts, Meter, Rates, report, utilization
from tests.unit.executor import TEXT, TEXT_PATH, Running, served
from tests.unit.scripted import Scripted

KNOWN = {"cpu_utilization", "mem_utilization", "application_utilization", "eps", "rps_fractional"}


def envoy(value: str) -> dict[str, float]:
    """As Envoy reads it (source/common/orca/orca_parser.cc, its rules in our words): anything it would refuse
    fails here. The whole report is lost to it for one bad entry."""
    assert value.startswith("TEXT ")
    found: dict[str, float] = {}
    for entry in value.removeprefix("TEXT ").split(","):
        name, sign, number = entry.strip(" \t").partition("=")
        assert all((sign, name, number)), entry
        assert name not in found, f"{name} twice"
        assert name in KNOWN or (name.startswith("named_metrics.") and name != "named_metrics."), name
        found[name] = float(number)
        assert math.isfinite(found[name])
    assert value.isascii()
    assert "\n" not in value
    return found


ANY = st.floats(allow_nan=True, allow_infinity=True)


@given(kv=ANY, capacity=ANY, waiting=st.integers(0, 10**9), flight=st.integers(0, 10**9), cpu=ANY, rps=ANY)
def test_whatever_an_engine_says_envoy_can_read_the_report(**said: Any) -> None:
    stats = EngineStats(waiting=said["waiting"], kv_used=said["kv"], capacity=said["capacity"])
    found = envoy(
        report(EngineFacts("x", sequences=4), stats, said["flight"], Rates(said["cpu"], said["rps"]))
    )
    assert found["application_utilization"] > 0
    assert found.get("rps_fractional", 1.0) > 0, "a rate that is no number is left out"
    assert found["named_metrics.queue"] == pytest.approx(said["waiting"], rel=1e-3)


def test_utilisation_is_load_relative_to_capacity() -> None:
    four = EngineFacts("x", sequences=4)
    assert utilization(four, EngineStats(running=2)) == 0.5
    assert utilization(four, EngineStats(running=4, waiting=4)) == 2.0, "more than 1: it queues"
    assert utilization(four, EngineStats(running=2, kv_used=0.9)) == 0.9, "the tightest counts"
    assert utilization(four, EngineStats(running=2, capacity=0.5)) == 1.0, "half of it is gone"
    assert utilization(EngineFacts("x"), EngineStats(running=50, kv_used=0.1)) == 0.1, "no limit known"
    assert utilization(four, EngineStats(running=1), 3) == 1.0, "with the answer's own, just ended"


def test_utilisation_is_of_sequences_and_not_of_requests() -> None:
    async def test(it: Running) -> None:
        await it.post(TEXT_PATH, TEXT | {"n": 3})
        assert envoy(it.last["endpoint-load-metrics"])["application_utilization"] == 0.75

    served(test, engine=Scripted(["a", "b"], facts=EngineFacts("scripted", "echo-1", sequences=4)))


def test_rates_are_of_the_last_window_and_read_seldom() -> None:
    at, counts, asked = 0.0, Counts(0.0, 0, 0), 0

    def now() -> float:
        return at

    def read() -> Counts:
        nonlocal asked
        asked += 1
        return counts

    meter = Meter(now, read, cpus=2)
    assert meter.rates() == Rates()
    for step in range(1, 201):
        at, counts = step * 0.1, Counts(step * 0.1, step * 5, step)  # one CPU of two, 50/s, 10 errors/s
        rates = meter.rates()
    assert rates.cpu == pytest.approx(0.5)
    assert rates.answers == pytest.approx(50)
    assert rates.errors == pytest.approx(10)
    assert asked <= 20 / SAMPLE_S + 2
    at += WINDOW_S + 1
    meter.rates()
    at += WINDOW_S + 1
    assert meter.rates() == Rates(0.0, 0.0, 0.0), "nothing for a whole window"


def test_the_report_stands_in_every_answer_streams_and_refusals_too() -> None:
    async def test(it: Running) -> None:
        await it.post(TEXT_PATH, TEXT)
        assert envoy(it.last["endpoint-load-metrics"])["named_metrics.requests_in_flight"] == 1
        await it.stream(TEXT_PATH, TEXT)
        assert envoy(it.last["endpoint-load-metrics"])["named_metrics.kv_cache_usage_perc"] == 0.25
        await it.post(TEXT_PATH, b"{")
        assert envoy(it.last["endpoint-load-metrics"])["application_utilization"] == 0.25
        for method, path in (
            ("GET", "/v1/models"),
            ("GET", "/v1/models/x"),
            ("GET", "/x"),
            ("PUT", TEXT_PATH),
        ):
            async with it.http.request(method, it.base + path) as answer:
                assert envoy(answer.headers["endpoint-load-metrics"])["named_metrics.queue"] == 0

    served(test, engine=Scripted(["a"], stats=EngineStats(kv_used=0.25)))
