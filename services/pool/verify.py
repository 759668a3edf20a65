"""Is it still the same engine? Memory given back while asleep, and one fixed prompt answered as before.

Law: the checks are pure and answer "" or what is wrong; `ask` alone runs the engine, greedily and bounded. No
generated word is known here beforehand: the engine is compared with itself before it slept.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass

from services.engine import FIXED_PROMPT, Engine, GenerateRequest
from services.faults import EngineHung

PROBE_TOKENS = 2
"""The first comes from all weights at once, the other from the KV cache too. Each costs a step, and the mesh
waits for it."""
GIVEN_BACK = 0.9
"""Least share of what it held that a sleeping engine gives back (vllm#32714: 6 GB instead of 20)."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came for the fixed prompt. ids: -1 where an upstream server tells text only: hence the text.
    engine: who made it: a second engine that steps in must not hide that the first one is broken."""

    ids: tuple[int, ...]
    text: str
    engine: str = ""

    def __str__(self) -> str:
        return f"{list(self.ids)} {self.text!r}" if any(i >= 0 for i in self.ids) else repr(self.text)


async def ask(engine: Engine, limit_s: float, tokens: int = PROBE_TOKENS) -> Answer:
    """The greedy answer to the fixed prompt. Raises what the engine raises, EngineHung after limit_s."""
    job = GenerateRequest("weir-fixed-prompt", FIXED_PROMPT, tokens)
    ids: list[int] = []
    text: list[str] = []
    maker = ""
    try:
        async with asyncio.timeout(limit_s), aclosing(engine.generate(job)) as made:
            async for token in made:
                ids.append(token.token_id)
                text.append(token.text)
                maker = token.engine
                if token.finish:
                    break
    except TimeoutError:
        raise EngineHung(f"the fixed prompt was not answered within {limit_s:g} s") from None
    return Answer(tuple(ids), "".join(text), maker)


def garbage(expected: Answer, got: Answer) -> str:
    """What is wrong with the answer after waking. Ids decide where there are any; text that comes without
    them may be cut into other pieces each time."""
    if expected.engine != got.engine:
        return f"the fixed prompt was answered by {got.engine!r}, before sleeping by {expected.engine!r}"
    told = any(i >= 0 for i in (*expected.ids, *got.ids))
    if expected.ids == got.ids if told else expected.text == got.text:
        return ""
    return f"the fixed prompt got {got}, before sleeping it was {expected}"


def kept_back(before: int, after: int, least: float = GIVEN_BACK) -> str:
    """Why the sleep gave too little memory back; bytes held before and after. 0 before: not known, fine."""
    given = before - after
    if before <= 0 or given >= least * before:
        return ""
    return (
        f"only {given / 2**20:.0f} of {before / 2**20:.0f} MiB were given back "
        f"({max(0, given) / before:.0%}, wanted {least:.0%})"
    )
