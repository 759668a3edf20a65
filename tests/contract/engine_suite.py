"""What every Engine must do, said once: run by test_engine_contract.py on each of them, and by the e2e test
of real vLLM; what it must do from start to end is in engine_lives.py.

Law: only the door (services/engine.py) is used. What an engine can't do by its nature is a field of
`Subject`, so that no check is skipped in silence. Waiting is polling with a deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import pytest

from services.engine import Engine, EngineFacts, EngineStats, FinishReason, GenerateRequest, Message, Token
from services.faults import Refused
from services.stops import Cutter

PATIENCE_S = 60.0
NEVER = 10**7
"""An id that no vocabulary has."""
_numbers = count()


@dataclass(frozen=True, slots=True)
class Subject:
    """One engine under test. make: a new one, not started. name: as its facts and tokens say. ids: it tells
    token ids. vocabulary: it refuses ids that it hasn't got. context: it refuses what is too long. invariant:
    the same tokens alone and among others. sampled: temperature and sample make a difference. chat: it takes
    messages. prompts: at least three, their answers at least 12 tokens with ignore_eos.
    """

    make: Callable[[], Engine]
    name: str
    ids: bool = True
    vocabulary: bool = True
    context: bool = True
    invariant: bool = True
    sampled: bool = True
    chat: bool = True
    prompts: tuple[GenerateRequest, ...] = ()

    def ask(self, index: int = 0, max_tokens: int = 12, **more: Any) -> GenerateRequest:
        """A request of its own id; greedy unless told otherwise, and it doesn't end by itself."""
        fixed = {"request_id": f"contract-{next(_numbers)}", "max_tokens": max_tokens, "ignore_eos": True}
        return replace(self.prompts[index], **{**fixed, **more})


def texts(*prompts: str) -> tuple[GenerateRequest, ...]:
    return tuple(GenerateRequest("", prompt, 1) for prompt in prompts)


PROMPTS = texts("The water of the river", "A stone on the bank said", "Once, at the spring,")


async def answer(engine: Engine, asked: GenerateRequest) -> list[Token]:
    async with aclosing(engine.generate(asked)) as made:
        return [token async for token in made]


def said(tokens: list[Token]) -> tuple[list[int], str]:
    """Ids and the whole text. Which token a piece of text stands with is no promise: a busy server puts
    several tokens into one event."""
    return [token.token_id for token in tokens], "".join(token.text for token in tokens)


async def until(what: str, holds: Callable[[], bool]) -> None:
    end = asyncio.get_running_loop().time() + PATIENCE_S
    while not holds():
        assert asyncio.get_running_loop().time() < end, f"not within {PATIENCE_S} s: {what}"
        await asyncio.sleep(0.01)


async def idle(engine: Engine) -> None:
    def at_rest() -> bool:
        now = engine.stats()
        return not (now.running or now.waiting)

    await until("nothing runs", at_rest)


# -- on an engine that is started


async def facts_are_whole(it: Subject, engine: Engine) -> None:
    facts = engine.facts()
    assert isinstance(facts, EngineFacts)
    assert facts.name == it.name
    assert facts.kv_block >= 1
    assert min(facts.context, facts.sequences, facts.kv_tokens, facts.weights_bytes) >= 0
    assert set(facts.sleep_levels) <= {1, 2}
    assert bool(facts.context) or not it.context


async def size_is_what_the_first_token_tells(it: Subject, engine: Engine) -> None:
    asked = it.ask()
    size = engine.size(asked)
    told = (await answer(engine, asked))[0].prompt_tokens
    assert told >= 0
    assert size > 0, "a prompt of no tokens is none that a rule or a scheduler can count with"
    assert engine.facts().estimates or not told or size == told
    assert engine.size(it.ask(prompt="", prompt_ids=(1, 2, 3))) == 3


async def greedy_is_the_same_twice(it: Subject, engine: Engine) -> None:
    first, second = [await answer(engine, it.ask(seed=7)) for _ in range(2)]
    assert said(first) == said(second)
    assert {token.token_id >= 0 for token in first} == {it.ids}
    other = await answer(engine, it.ask(1, seed=7))
    assert said(first) != said(other), "the prompt makes no difference"


async def max_tokens_is_kept(it: Subject, engine: Engine) -> None:
    for most in (1, 2, 9):
        tokens = await answer(engine, it.ask(max_tokens=most))
        assert len(tokens) == most
        assert [token.finish for token in tokens] == [None] * (most - 1) + [FinishReason.LENGTH]
        assert {token.engine for token in tokens} == {it.name}


async def a_stop_string_ends_it(it: Subject, engine: Engine) -> None:
    """Whether the stop string itself is told is the engine's affair: the edge cuts it off."""
    whole = "".join(token.text for token in await answer(engine, it.ask()))
    stop = whole[len(whole) // 2 :][:4]
    tokens = await answer(engine, it.ask(stop=(stop,)))
    assert tokens[-1].finish is FinishReason.STOP
    cut = Cutter((stop,))
    kept = "".join(cut.feed(token.text) for token in tokens) + cut.rest()
    assert kept == whole[: whole.index(stop)]


async def messages_are_a_prompt(it: Subject, engine: Engine) -> None:
    if it.chat:
        turns = (Message("user", "Where does the river go?"),)
        asked = GenerateRequest("chat", "user: Where does the river go?", 4, messages=turns, ignore_eos=True)
        assert len(await answer(engine, asked)) == 4
        # One that names no length comes with all that the context leaves, as far as the door can tell.
        most = (engine.facts().context or 64) - engine.size(asked)
        made = engine.generate(replace(asked, request_id="open", max_tokens=most, open_ended=True))
        assert await anext(made)
        await made.aclose()
        await idle(engine)


async def closing_cancels(it: Subject, engine: Engine) -> None:
    made = engine.generate(it.ask(max_tokens=200))
    await anext(made)
    await until("it runs", lambda: engine.stats().running >= 1)
    await made.aclose()
    await idle(engine)
    await until("its KV is free", lambda: engine.stats().kv_used < 0.01)


async def cancelling_a_task_cancels(it: Subject, engine: Engine) -> None:
    """Also before the first token has come."""
    for wait_s in (0.0, 0.05):
        task = asyncio.create_task(answer(engine, it.ask(max_tokens=200)))
        await asyncio.sleep(wait_s)
        task.cancel()
        await asyncio.wait((task,))
        await idle(engine)
    assert len(await answer(engine, it.ask(max_tokens=2))) == 2


async def together_is_as_alone(it: Subject, engine: Engine) -> None:
    asked = [it.ask(index % len(it.prompts)) for index in range(6)]
    together = await asyncio.gather(*(answer(engine, one) for one in asked))
    assert [len(tokens) for tokens in together] == [12] * 6
    if it.invariant:
        alone = [await answer(engine, it.ask(index)) for index in range(len(it.prompts))]
        assert [said(t) for t in together] == [said(alone[i % len(it.prompts)]) for i in range(6)]


async def sampling_is_seeded(it: Subject, engine: Engine) -> None:
    if it.sampled:
        hot = {"temperature": 1.5, "seed": 11}
        first, again, other = [
            said(await answer(engine, it.ask(**hot, **more))) for more in ({}, {}, {"sample": 1})
        ]
        assert first == again
        assert first != other


async def _taken(engine: Engine, asked: GenerateRequest) -> None:
    """As the edge does it: what size says is heard before anything is generated."""
    engine.size(asked)
    await answer(engine, asked)


async def what_can_never_be_served_is_refused(it: Subject, engine: Engine) -> None:
    bad = []
    if it.vocabulary:
        bad.append(it.ask(prompt="", prompt_ids=(1, NEVER)))
    if it.context:
        bad.append(it.ask(max_tokens=engine.facts().context + 1))
    for asked in bad:
        with pytest.raises(Refused) as caught:
            await _taken(engine, asked)
        assert caught.value.status == 400
    if it.context:
        assert caught.value.code == "context_length_exceeded"
    await idle(engine)
    assert len(await answer(engine, it.ask(max_tokens=2))) == 2, "it goes on afterwards"


async def it_does_not_sleep_while_it_runs(it: Subject, engine: Engine) -> None:
    made = engine.generate(it.ask(max_tokens=60))
    first = await anext(made)
    for level in engine.facts().sleep_levels or (1,):
        with pytest.raises(RuntimeError):
            await engine.sleep(level)
    rest = [token async for token in made]
    assert [first, *rest][-1].finish is FinishReason.LENGTH
    assert len(rest) == 59


async def it_says_the_same_after_sleep(it: Subject, engine: Engine) -> None:
    before = said(await answer(engine, it.ask()))
    await idle(engine)
    for level in engine.facts().sleep_levels:
        for _ in range(2):
            await engine.sleep(level)
            with pytest.raises(RuntimeError):
                await answer(engine, it.ask())
            assert isinstance(engine.stats(), EngineStats)
            await engine.wake()
            assert said(await answer(engine, it.ask())) == before
    if not engine.facts().sleep_levels:
        with pytest.raises(RuntimeError):
            await engine.sleep(1)
        assert said(await answer(engine, it.ask())) == before, "refusing to sleep changes nothing"


async def statistics_tell_what_was_done(it: Subject, engine: Engine) -> None:
    before = engine.stats().tokens
    await answer(engine, it.ask(max_tokens=10))
    await until("ten more tokens", lambda: engine.stats().tokens >= before + 10)
    now = engine.stats()
    assert not now.dead
    assert 0 <= now.kv_used <= 1
    assert 0 <= now.fragmentation <= 1


Check = Callable[[Subject, Engine], Awaitable[None]]
CHECKS: Mapping[str, Check] = {
    check.__name__: check
    for check in (
        facts_are_whole,
        size_is_what_the_first_token_tells,
        greedy_is_the_same_twice,
        max_tokens_is_kept,
        a_stop_string_ends_it,
        messages_are_a_prompt,
        closing_cancels,
        cancelling_a_task_cancels,
        together_is_as_alone,
        sampling_is_seeded,
        what_can_never_be_served_is_refused,
        it_does_not_sleep_while_it_runs,
        it_says_the_same_after_sleep,
        statistics_tell_what_was_done,
    )
}
