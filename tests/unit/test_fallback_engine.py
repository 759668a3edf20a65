"""Which of two engines answers, in virtual time: long sequences, full queues, deadlines; what is told."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from services.batching.model import BatchingSettings
from services.batching.scheduled import Scheduled
from services.engine import Engine, GenerateRequest
from services.engines.sim import SimEngine
from services.fallback.engine import REMEMBERED, FallbackEngine, TellsReason
from services.fallback.rules import DEFAULT_RULES
from services.faults import DeadlinePassed, EngineFault, Refused
from services.sim_cost import SimOptions
from tests.fakes.loop_clock import LoopClock
from tests.fakes.two_engines import Script
from tests.unit.fallback_pair import ASK, FULL, counted, names, pair, said, started
from tests.virtual import run


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


def test_without_rules_nothing_falls_back() -> None:
    async def main() -> None:
        both = await started(Script("a", error=EngineFault("no")), Script("b"), rules=())
        with pytest.raises(EngineFault, match="no"):
            await said(both)
        assert await names(both, replace(ASK, prompt="p" * 9000)) == {"a"}

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
