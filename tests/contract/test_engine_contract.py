"""One behaviour for all engines: the suite in engine_suite.py on each of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from services.engine import Engine
from tests.contract import engine_subjects as subjects
from tests.contract.engine_lives import leaves_nothing
from tests.contract.engine_suite import CHECKS, Subject
from tests.fakes.vllm_wire import ORDERS

pytestmark = pytest.mark.real
ENGINES = [
    "echo",
    "sim",
    pytest.param("torch", marks=pytest.mark.torch),
    "openai, stand-in",
    "openai, executor",
    "vllm, stand-in",
]


@dataclass(frozen=True, slots=True)
class Running:
    subject: Subject
    engine: Engine
    runner: asyncio.Runner


@pytest.fixture(scope="module", params=ENGINES)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    folder = tmp_path_factory.mktemp("engine")
    orders = subjects.Orders(folder)
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setenv(ORDERS, str(orders.file))
        match request.param:
            case "echo":
                yield subjects.echo()
            case "sim":
                yield subjects.sim()
            case "torch":
                yield subjects.torch(folder)
            case "openai, stand-in":
                yield stack.enter_context(subjects.openai_on_stand_in(folder, orders))
            case "openai, executor":
                yield stack.enter_context(subjects.openai_on_executor(folder, "127.107.6.10"))
            case "vllm, stand-in":
                yield subjects.vllm(folder)


@pytest.fixture(scope="module")
def running(subject: Subject) -> Iterator[Running]:
    """One engine for all checks, on one loop: they must leave it as they found it."""
    with asyncio.Runner() as runner:
        engine = subject.make()
        runner.run(engine.start())
        try:
            yield Running(subject, engine, runner)
        finally:
            runner.run(engine.close())


@pytest.mark.parametrize("check", CHECKS)
def test_engine(running: Running, check: str) -> None:
    running.runner.run(_check(running, check))


async def _check(it: Running, check: str) -> None:
    await CHECKS[check](it.subject, it.engine)


def test_a_life_of_its_own(subject: Subject) -> None:
    leaves_nothing(subject)


def test_no_engine_is_left_out() -> None:
    """Every engine that can be named is among those that the suite runs on."""
    from services.engines import ENGINES as NAMES

    params = [one if isinstance(one, str) else one.values[0] for one in ENGINES]
    assert {str(name).partition(",")[0] for name in params} == set(NAMES)
