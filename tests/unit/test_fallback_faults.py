"""A fallback whose engines fail, die, leave or sleep: what is hidden from the client and what never is."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from regions.cli.errors import UsageError
from services.engine import GenerateRequest
from services.engines.sim import SimEngine
from services.fallback.engine import FallbackEngine
from services.fallback.rules import DEFAULT_RULES
from services.faults import BadLogits, DeadlinePassed, EngineDied, EngineFault, Refused
from services.sim_cost import SimOptions
from tests.fakes.loop_clock import LoopClock
from tests.fakes.two_engines import Script
from tests.unit.fallback_pair import ASK, counted, names, pair, said, started
from tests.virtual import run


@pytest.mark.parametrize(
    "error", [EngineFault("no"), BadLogits("nan"), EngineDied("gone"), RuntimeError("bug"), ValueError("bug")]
)
def test_an_error_before_the_first_token_is_answered_by_the_secondary(error: Exception) -> None:
    async def main() -> None:
        both = await started(Script("a", error=error), Script("b"))
        tokens = await said(both)
        assert [t.token_id for t in tokens] == [0, 1, 2, 3]
        assert {t.engine for t in tokens} == {"b"}
        assert both.reason_of("r") == "engine_error"
        assert await names(both, replace(ASK, request_id="next")) == {"a"}

    run(main())


def test_a_primary_that_stays_broken_is_told_loudly_but_not_every_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        both = await started(Script("a", error=EngineFault("no"), always=True), Script("b"))
        for _ in range(20):
            await said(both)

    run(main())
    told = [r.getMessage() for r in caplog.records if r.name == "weir.fallback" and r.levelname == "WARNING"]
    assert [message.rpartition("(")[2] for message in told] == [f"{n} so far)" for n in (1, 2, 4, 8, 16)]
    assert "EngineFault: no" in told[0]
    assert "prompt" not in "".join(r.getMessage() for r in caplog.records)


def test_an_error_after_the_first_token_is_never_hidden() -> None:
    async def main() -> None:
        first, second = Script("a", error=EngineFault("broke"), after=2), Script("b")
        both = await started(first, second)
        tokens = both.generate(ASK)
        got = [await anext(tokens), await anext(tokens)]
        with pytest.raises(EngineFault, match="broke"):
            await anext(tokens)
        assert [t.engine for t in got] == ["a", "a"]
        assert second.seen == []
        assert both.reason_of("r") == ""

    run(main())


@pytest.mark.parametrize(
    "error",
    [
        Refused(400, "unknown_token", "never"),
        Refused(429, "rate_limited", "not you"),
        Refused(503, "draining", "soon gone"),
        DeadlinePassed("too late"),
    ],
)
def test_what_no_rule_names_is_not_sent_elsewhere(error: Exception) -> None:
    async def main() -> None:
        second = Script("b")
        both = await started(Script("a", error=error), second)
        with pytest.raises(type(error)) as caught:
            await said(both)
        assert caught.value is error
        assert second.seen == []

    run(main())


def test_the_first_error_is_told_when_the_secondary_fails_before_it_began() -> None:
    async def main() -> None:
        first = Script("a", error=BadLogits("nan"))
        both = await started(first, Script("b", error=EngineFault("b is broken")))
        with pytest.raises(BadLogits, match="nan") as caught:
            await said(both)
        assert "b is broken" in str(caught.value.__cause__)

    run(main())


def test_the_secondarys_own_error_is_told_once_it_began() -> None:
    async def main() -> None:
        both = await started(
            Script("a", error=BadLogits("nan")), Script("b", error=EngineFault("late"), after=1)
        )
        with pytest.raises(EngineFault, match="late"):
            await said(both)

    run(main())


def test_another_model_is_refused_at_the_start_and_both_are_closed() -> None:
    async def main() -> None:
        first, second = Script("a", "small"), Script("b", "large")
        with pytest.raises(UsageError, match=r"'small'.*'large'"):
            await pair(first, second).start()
        assert first.done == second.done == ["start", "close"]

    run(main())


def test_a_secondary_that_doesnt_start_takes_the_primary_down_with_it() -> None:
    async def main() -> None:
        first, second = Script("a"), Script("b", broken=("start",))
        both = pair(first, second)
        with pytest.raises(RuntimeError, match="b can't start"):
            await both.start()
        assert first.done == ["start", "close"]
        with pytest.raises(RuntimeError, match="not started"):
            await said(both)

    run(main())


def test_a_client_that_leaves_closes_the_engine_that_answers() -> None:
    async def main() -> None:
        first, second = Script("a"), Script("b", token_s=1.0)
        both = await started(first, second)
        for ask in (ASK, replace(ASK, request_id="long", max_tokens=9000)):
            tokens = both.generate(ask)
            await anext(tokens)
            assert both.stats().running == 1
            await tokens.aclose()
            assert both.stats().running == 0
        assert (first.closed_early, second.closed_early) == (1, 1)
        assert counted(both, "active", "sequence_length") == 0

    run(main())


def test_a_cancelled_wait_frees_and_counts_down() -> None:
    async def main() -> None:
        second = Script("b", wait_s=100.0)
        both = await started(Script("a"), second)
        task = asyncio.create_task(said(both, replace(ASK, max_tokens=9000)))
        await asyncio.sleep(5)
        assert counted(both, "active", "sequence_length") == 1
        assert both.stats().extra["weir_fallback_engaged_seconds_total"] == pytest.approx(5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert both.stats().running == 0
        assert counted(both, "active", "sequence_length") == 0
        assert counted(both, "failed_total", "sequence_length") == 0
        await asyncio.sleep(50)
        assert both.stats().extra["weir_fallback_engaged_seconds_total"] == pytest.approx(5)

    run(main())


def test_a_dead_primary_is_no_longer_asked_and_the_instance_lives_on_with_less() -> None:
    async def main() -> None:
        first, second = Script("a", sequences=8), Script("b", sequences=2)
        both = await started(first, second)
        first.dead = "the device is gone"
        assert await names(both) == {"b"}
        assert first.seen == []
        assert both.reason_of("r") == "engine_error"
        stats = both.stats()
        assert (stats.dead, stats.capacity) == ("", 0.25)
        assert stats.extra['weir_fallback_engine_dead{engine="primary"}'] == 1
        second.dead = "too"
        assert both.stats().dead == "the device is gone"
        assert await names(both) == {"a"}  # nobody to fall back to: the primary tells for itself

    run(main())


def test_a_dead_primary_kills_where_no_rule_covers_it() -> None:
    async def main() -> None:
        first = Script("a")
        both = await started(first, Script("b"), rules=DEFAULT_RULES[:1])
        first.dead = "gone"
        assert both.stats().dead == "gone"

    run(main())


def test_both_sleep_and_wake_or_none() -> None:
    async def main() -> None:
        first, second = Script("a", sleep_levels=(1, 2)), Script("b")
        both = await started(first, second)
        await both.sleep(2)
        assert (first.done[-1], second.done[-1]) == ("sleep 2", "sleep 1")
        with pytest.raises(RuntimeError, match="sleeps"):
            await said(both)
        second.broken = ("wake",)
        with pytest.raises(RuntimeError, match="b can't wake"):
            await both.wake()
        assert first.done[-2:] == ["wake", "sleep 2"]
        second.broken = ()
        await both.wake()
        assert await names(both) == {"a"}
        second.broken = ("sleep",)
        with pytest.raises(RuntimeError, match="b can't sleep"):
            await both.sleep()
        assert first.done[-2:] == ["sleep 1", "wake"]
        assert await names(both) == {"a"}
        assert both.facts().sleep_levels == (1,)
        await both.close()
        assert (first.done[-1], second.done[-1]) == ("close", "close")

    run(main())


def test_it_doesnt_sleep_while_the_secondary_runs() -> None:
    async def main() -> None:
        first, second = Script("a"), Script("b", token_s=1.0)
        both = await started(first, second)
        tokens = both.generate(replace(ASK, max_tokens=9000))
        await anext(tokens)
        with pytest.raises(RuntimeError, match="sequences are running"):
            await both.sleep()
        assert first.done == ["start"]
        await tokens.aclose()

    run(main())


def test_two_real_sims_under_faults_answer_everything_once() -> None:
    """Half the primary's requests fail before their first token; every client still gets one whole answer."""

    async def main() -> None:
        clock = LoopClock()
        first = SimEngine(SimOptions(fail_rate=0.5, fault_seed=3), "m", clock)
        second = SimEngine(SimOptions(speed=0.5), "m", clock)
        both = FallbackEngine(first, second, clock=clock)
        await both.start()
        asks = [GenerateRequest(f"r{n}", f"prompt {n}", 8, seed=n) for n in range(60)]
        answers = await asyncio.gather(*(said(both, ask) for ask in asks))
        assert all(len(answer) == 8 and answer[-1].finish for answer in answers)
        fell = sum(both.reason_of(ask.request_id) == "engine_error" for ask in asks)
        assert 10 < fell < 50
        assert counted(both, "requests_total", "engine_error") == fell
        assert both.stats().running == both.stats().waiting == 0
        assert both.stats().kv_used == 0
        await both.close()

    run(main())
