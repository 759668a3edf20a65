"""Two scripted engines with a fallback over them, and what a test asks of it.

Law: no cleverness; the engines are those of tests/fakes/two_engines.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing

from services.engine import Engine, GenerateRequest, Token
from services.fallback.engine import FallbackEngine
from services.fallback.rules import DEFAULT_RULES, Rule
from services.faults import Refused
from tests.fakes.loop_clock import LoopClock
from tests.fakes.two_engines import Script

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
