"""The engines that tests put in the place of real ones keep the contract of engines, as far as they go.

Law: the checks are those of tests/contract/engine_suite.py; what a stand-in leaves out is named here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from services.devices.door import ANYWHERE
from services.engine import Engine
from tests.contract.engine_suite import CHECKS, PROMPTS, Subject
from tests.fakes.sleepy_engine import Orders, SleepyEngine
from tests.fakes.two_engines import Script
from tests.unit.scripted import Scripted

WORDS = ("a", "b", "c")
SPEAKS = {"facts_are_whole", "size_is_what_the_first_token_tells"}
"""All that one who says the same to everybody can be held to."""
ENDS = SPEAKS | {"max_tokens_is_kept", "closing_cancels", "messages_are_a_prompt"}


def subject(make: Callable[[], Engine], name: str) -> Subject:
    return Subject(make, name, vocabulary=False, context=False, sampled=False, prompts=PROMPTS)


def check(it: Subject, name: str) -> None:
    async def run() -> None:
        engine = it.make()
        await engine.start()
        try:
            await CHECKS[name](it, engine)
        finally:
            await engine.close()

    asyncio.run(run())


@pytest.mark.parametrize("name", CHECKS)
def test_the_one_of_the_pool_is_an_engine_in_all_that_counts(name: str) -> None:
    check(subject(lambda: SleepyEngine(Orders(), ANYWHERE, 0), "echo"), name)


@pytest.mark.parametrize("name", sorted(ENDS))
def test_the_one_of_the_fallback_keeps_to_its_length_and_lets_go(name: str) -> None:
    check(subject(lambda: Script("script", token_s=0.001), "script"), name)


@pytest.mark.parametrize("name", sorted(SPEAKS))
def test_the_one_of_the_edge_tells_its_sizes(name: str) -> None:
    check(subject(lambda: Scripted(WORDS), "scripted"), name)


def test_all_of_them_are_engines() -> None:
    for made in (SleepyEngine(Orders(), ANYWHERE, 0), Script("script"), Scripted(WORDS)):
        assert isinstance(made, Engine)
