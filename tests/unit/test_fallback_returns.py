"""A rule that takes a request from a primary that is well: where the secondary can't, the primary answers."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from services.faults import BadLogits, DeadlinePassed, EngineDied, EngineFault, Refused
from tests.fakes.two_engines import Script
from tests.unit.fallback_pair import ASK, counted, names, said, started
from tests.virtual import run

LONG = replace(ASK, prompt="p" * 9000)


@pytest.mark.parametrize(
    "trouble",
    [
        Refused(400, "context_length_exceeded", "the second one is shorter"),
        Refused(429, "queue_full", "the second one is full"),
        EngineFault("the second one fails"),
        EngineDied("the second one dies"),
    ],
)
@pytest.mark.parametrize("rule", ["sequence_length", "fragmentation"])
def test_what_a_rule_takes_from_a_primary_that_is_well_comes_back_to_it(
    rule: str, trouble: Exception
) -> None:
    async def main() -> None:
        first, second = Script("a"), Script("b", error=trouble)
        both = await started(first, second)
        if rule == "fragmentation":
            first.fragmentation, first.extra_running = 0.7, 1
        ask = LONG if rule == "sequence_length" else ASK
        assert await names(both, ask) == {"a"}
        assert len(second.seen) == len(first.seen) == 1
        assert both.reason_of("r") == "", "the header tells who answers, and not who was asked"
        assert counted(both, "requests_total", rule) == 1
        assert counted(both, "failed_total", rule) == counted(both, "returned_total", rule) == 1
        assert counted(both, "active", rule) == 0
        assert await names(both, ask) == {"b"}
        assert both.reason_of("r") == rule
        assert counted(both, "returned_total", rule) == 1

    run(main())


@pytest.mark.parametrize(
    ("second", "first", "told"),
    [
        (EngineFault("second"), EngineFault("first"), "first"),
        (Refused(400, "context_length_exceeded", "second"), Refused(429, "queue_full", "first"), "first"),
        (EngineFault("second"), Refused(400, "kv_never_fits", "first"), "second"),
        (Refused(400, "kv_never_fits", "second"), Refused(400, "kv_never_fits", "first"), "second"),
    ],
)
def test_where_neither_can_the_client_hears_what_may_pass(
    second: Exception, first: Exception, told: str
) -> None:
    async def main() -> None:
        both = await started(Script("a", error=first), Script("b", error=second))
        with pytest.raises(EngineFault, match=told):
            await said(both, LONG)
        assert both.reason_of("r") == ""
        assert (both.stats().running, counted(both, "active", "sequence_length")) == (0, 0)

    run(main())


def test_nothing_comes_back_that_has_begun_or_whose_time_is_over_or_to_the_dead() -> None:
    async def main(second: Script, kind: type[Exception], dead: str = "", deadline: float = 9.0) -> None:
        first = Script("a", dead=dead)
        both = await started(first, second)
        with pytest.raises(kind):
            await said(both, replace(LONG, deadline_s=deadline))
        assert first.seen == []

    run(main(Script("b", error=BadLogits("late"), after=1), BadLogits))
    run(main(Script("b", error=BadLogits("first")), BadLogits, dead="gone"))
    run(main(Script("b", error=DeadlinePassed("over")), DeadlinePassed))
    run(main(Script("b", error=BadLogits("slow"), wait_s=10.0), DeadlinePassed))


def test_a_client_that_leaves_while_it_comes_back_leaves_nothing() -> None:
    async def main() -> None:
        first = Script("a", wait_s=5.0)
        both = await started(first, Script("b", error=EngineFault("no"), wait_s=5.0))
        for leaves_at in (3.0, 7.0):
            task = asyncio.create_task(said(both, LONG))
            await asyncio.sleep(leaves_at)
            task.cancel()
            await asyncio.wait((task,))
            assert (both.stats().running, counted(both, "active", "sequence_length")) == (0, 0)
        assert first.closed_early == 1

    run(main())
