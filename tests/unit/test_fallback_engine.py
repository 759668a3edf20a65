"""Two engines behind one door: who answers, what is told, what is counted, and that nothing is hidden."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace

import pytest

from regions.cli.errors import UsageError
from services.batching.model import BatchingSettings
from services.batching.scheduled import Scheduled
from services.engine import Engine, GenerateRequest, Token
from services.engines.sim import SimEngine
from services.fallback.engine import REMEMBERED, FallbackEngine, TellsReason
from services.fallback.rules import DEFAULT_RULES, Rule
from services.faults import BadLogits, DeadlinePassed, EngineDied, EngineFault, Refused
from services.sim_cost import SimOptions
from tests.fakes.loop_clock import LoopClock
from tests.fakes.two_engines import Script
from tests.virtual import run

ASK = GenerateRequest("r", "prompt", 4)
FULL = Refused(429, "queue_full", "the queue is full", retry_after_s=2.0)


def pair(first: Engine, second: Engine, rules: Sequence[Rule] = DEFAULT_RULES) -> FallbackEngine:
    return FallbackEngine(first, second, tuple(rules), LoopClock())


async def said(engine: Engine, ask: GenerateRequest = ASK) -> list[Token]:
    async with aclosing(engine.generate(ask)) as tokens:
        return [token async for token in tokens]


async def names(engine: Engine, ask: GenerateRequest = ASK) -> set[str]:
    return {token.engine for token in await said(engine, ask)}


async def started(first: Script, second: Script, rules: Sequence[Rule] = DEFAULT_RULES) -> FallbackEngine:
    both = pair(first, second, rules)
    await both.start()
    return both


def counted(engine: FallbackEngine, what: str, reason: str) -> float:
    return engine.stats().extra[f'weir_fallback_{what}{{reason="{reason}"}}']


def test_it_is_an_engine_that_tells_its_reason() -> None:
    both = pair(Script("a"), Script("b"))
    assert isinstance(both, Engine)
    assert isinstance(both, TellsReason)


def test_the_primary_answers_when_no_rule_speaks() -> None:
    async def main() -> None:
        both = await started(Script("a"), Script("b"))
        assert await names(both) == {"a"}
        assert both.reason_of("r") == ""
        assert both.stats().extra["weir_fallback_engaged_seconds_total"] == 0

    run(main())


def test_a_long_sequence_goes_to_the_secondary_and_says_so() -> None:
    async def main() -> None:
        first, second = Script("a"), Script("b", token_s=0.001)
        both = await started(first, second)
        long = replace(ASK, prompt="p" * 8000, max_tokens=193)
        assert await names(both, long) == {"b"}
        assert both.reason_of("r") == "sequence_length"
        assert first.seen == []
        assert await names(both, replace(long, request_id="s", max_tokens=192)) == {"a"}
        assert both.reason_of("s") == ""
        assert counted(both, "requests_total", "sequence_length") == 1
        assert counted(both, "seconds_total", "sequence_length") == pytest.approx(0.193)
        assert counted(both, "first_token_seconds_total", "sequence_length") == pytest.approx(0.001)

    run(main())


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


def test_a_full_queue_spills_over_and_comes_through_when_both_are_full() -> None:
    async def main() -> None:
        first, second = Script("a", error=FULL, always=True), Script("b")
        both = await started(first, second)
        assert await names(both) == {"b"}
        assert both.reason_of("r") == "queue_full"
        second.error = Refused(429, "queue_full", "mine is full too", retry_after_s=9.0)
        with pytest.raises(Refused, match="the queue is full") as caught:
            await said(both)
        assert caught.value is FULL
        assert isinstance(caught.value.__cause__, Refused)
        assert counted(both, "failed_total", "queue_full") == 1
        assert counted(both, "requests_total", "queue_full") == 2

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


def test_what_the_primarys_cache_can_never_hold_is_a_long_sequence_too() -> None:
    async def main() -> None:
        both = await started(Script("a", error=Refused(400, "kv_never_fits", "never")), Script("b"))
        assert await names(both) == {"b"}
        assert both.reason_of("r") == "sequence_length"

    run(main())


def test_a_prompt_that_the_primary_cant_even_count_in_is_the_secondarys() -> None:
    too_long, unknown = (
        Refused(400, "context_length_exceeded", "too long"),
        Refused(400, "unknown_token", "no"),
    )

    async def main() -> None:
        first, second = Script("a"), Script("b")
        both = await started(first, second)
        first.size_error = too_long
        assert both.size(ASK) == 6
        assert await names(both) == {"b"}
        assert both.reason_of("r") == "sequence_length"
        second.size_error = Refused(400, "context_length_exceeded", "for me as well")
        with pytest.raises(Refused, match="too long"):
            both.size(ASK)
        with pytest.raises(Refused, match="too long"):
            await said(both)
        first.size_error, second.size_error = unknown, None
        with pytest.raises(Refused, match="no"):
            both.size(ASK)

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


def test_without_rules_nothing_falls_back() -> None:
    async def main() -> None:
        both = await started(Script("a", error=EngineFault("no")), Script("b"), rules=())
        with pytest.raises(EngineFault, match="no"):
            await said(both)
        assert await names(both, replace(ASK, prompt="p" * 9000)) == {"a"}

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


def test_fragmentation_has_two_limits_and_an_idle_primary_is_tried() -> None:
    async def main() -> None:
        first = Script("a", fragmentation=0.6, extra_running=2)
        both = await started(first, Script("b"))
        seen = []
        for figure in (0.6, 0.7, 0.6, 0.56, 0.55, 0.6, 0.66):
            first.fragmentation = figure
            seen.append((await names(both)).pop())
        assert "".join(seen) == "abbbaab"
        first.extra_running, first.fragmentation = 0, 0.9
        assert await names(both) == {"a"}
        assert counted(both, "requests_total", "fragmentation") == 4

    run(main())


def test_the_secondary_gets_what_is_left_of_the_deadline() -> None:
    async def main() -> None:
        first, second = (
            Script("a", error=EngineFault("slow and broken"), wait_s=3.0),
            Script("b", token_s=0.1),
        )
        both = await started(first, second)
        assert await names(both, replace(ASK, deadline_s=10.0)) == {"b"}
        assert second.seen[0].deadline_s == pytest.approx(7.0)
        first.error = EngineFault("again")
        with pytest.raises(DeadlinePassed):
            await said(both, replace(ASK, deadline_s=2.0))
        assert len(second.seen) == 1
        assert counted(both, "active", "engine_error") == 0

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


def test_what_asks_for_all_there_is_isnt_a_long_sequence() -> None:
    """The door makes context - prompt of a missing max_tokens: else every chat would be a long one."""

    async def main() -> None:
        first, second = Script("a", context=131072), Script("b", context=131072)
        both = await started(first, second)
        tokens = both.generate(replace(ASK, max_tokens=131072 - 6))
        assert (await anext(tokens)).engine == "a"
        await tokens.aclose()
        assert first.seen[0].max_tokens == 131072 - 6
        tokens = both.generate(replace(ASK, max_tokens=131072 - 7))
        assert (await anext(tokens)).engine == "b"
        await tokens.aclose()

    run(main())


def test_the_context_is_the_longer_one_and_the_primary_gets_what_it_can_hold() -> None:
    async def main() -> None:
        first, second = Script("a", context=1000), Script("b", context=4000)
        both = await started(first, second)
        assert both.facts().context == 4000
        assert len(await said(both, replace(ASK, max_tokens=4000 - 6))) == 1000 - 6
        assert await names(both, replace(ASK, max_tokens=995)) == {"b"}
        assert await names(both, replace(ASK, prompt="p" * 1000, max_tokens=3000)) == {"b"}
        assert pair(first, second, DEFAULT_RULES[1:]).facts().context == 1000

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


def test_figures_of_both_are_added_and_keep_their_names_apart() -> None:
    async def main() -> None:
        both = await started(Script("a", fragmentation=0.3), Script("b", fragmentation=0.9))
        stats = both.stats()
        assert (stats.memory_bytes, stats.fragmentation) == (2000, 0.3)
        assert (stats.extra["steps"], stats.extra["secondary_steps"]) == (1.0, 1.0)
        assert both.facts().weights_bytes == 200
        one = FallbackEngine(Script("a"), Script("b"), clock=LoopClock(), shared=True)
        assert (one.facts().weights_bytes, one.stats().memory_bytes) == (100, 1000)
        assert both.facts().name == "a"

    run(main())


def test_reasons_are_forgotten_one_day() -> None:
    async def main() -> None:
        both = await started(Script("a"), Script("b"))
        for number in range(REMEMBERED + 1):
            tokens = both.generate(replace(ASK, request_id=f"r{number}", max_tokens=9000))
            await anext(tokens)
            await tokens.aclose()
        assert both.reason_of("r0") == ""
        assert both.reason_of(f"r{REMEMBERED}") == "sequence_length"

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


def test_as_it_is_put_together_a_burst_spills_over_and_the_rest_is_refused() -> None:
    """Fallback( Scheduled, Scheduled ): what neither queue has room for is refused at once, with the
    primary's word; everybody else gets a whole answer, and all of it is given back."""

    async def main() -> None:
        clock, how = LoopClock(), BatchingSettings(batch_size=2, concurrency=1, queue_limit=4)
        sims = [SimEngine(SimOptions(slots=2), "m", clock) for _ in range(2)]
        both = FallbackEngine(*(Scheduled(sim, how, clock) for sim in sims), clock=clock)
        await both.start()
        asks = [GenerateRequest(f"r{n}", "prompt", 5) for n in range(20)]
        ends = await asyncio.gather(*(said(both, ask) for ask in asks), return_exceptions=True)
        answered = [ask for ask, end in zip(asks, ends, strict=True) if isinstance(end, list)]
        refused = [end for end in ends if isinstance(end, Refused)]
        assert len(answered) + len(refused) == len(asks)
        assert {error.code for error in refused} == {"queue_full"}
        second = [ask for ask in answered if both.reason_of(ask.request_id) == "queue_full"]
        assert len(answered) == 12  # two run and four wait, at each of the two
        assert len(second) == 6
        assert counted(both, "failed_total", "queue_full") == len(refused)
        assert both.stats().running == both.stats().waiting == 0
        await both.close()

    run(main())
