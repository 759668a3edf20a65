"""The Engine that holds two of the same model: the primary answers, the secondary where a rule says so.

Law: an error after the first token is never hidden; another model never answers. Each of the two is asked
once at most. The second engine is help and no hurdle: what the primary would serve is served, and where
neither can, the client hears the primary, unless that would call a passing trouble one for ever.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Protocol, runtime_checkable

from mesh.clock import Clock, SystemClock
from services.engine import Engine, EngineFacts, EngineStats, GenerateRequest, Token
from services.fallback.pair import Pair
from services.fallback.rules import (
    DEFAULT_RULES,
    STAY,
    Choice,
    Facts,
    Reason,
    Rule,
    Which,
    decide,
    fragmented,
)
from services.fallback.tally import Tally
from services.faults import DeadlinePassed, EngineFault, Refused

log = logging.getLogger("weir.fallback")

NEVER = 400
"""Status of a refusal that no waiting cures."""
REMEMBERED = 4096
"""Reasons kept for `reason_of`, also a while after the answer ended."""


@runtime_checkable
class TellsReason(Protocol):
    """What the answer's header x-weir-fallback asks of an engine that has it."""

    def reason_of(self, request_id: str) -> str:
        """Why the second engine answers this request; "": it doesn't."""


class FallbackEngine:
    """An Engine over two. Neither is started yet; `start` starts both and refuses two different models.

    shared: both run on the same memory (the torch engine's two modes), which then counts once.
    """

    def __init__(
        self,
        primary: Engine,
        secondary: Engine,
        rules: tuple[Rule, ...] = DEFAULT_RULES,
        clock: Clock | None = None,
        *,
        shared: bool = False,
    ) -> None:
        self._pair, self._rules = Pair(primary, secondary, shared=shared), rules
        self._clock = clock or SystemClock()
        self._long = any(rule.when is Reason.SEQUENCE_LENGTH for rule in rules)
        self._tally = Tally(reason.value for reason in Reason)
        self._reasons: OrderedDict[str, str] = OrderedDict()
        self._fragmented = False

    @property
    def parts(self) -> tuple[Engine, Engine]:
        """The primary and the secondary, for who reads figures of their own."""
        return self._pair.primary, self._pair.secondary

    async def start(self) -> None:
        """Raises UsageError when the two serve different models."""
        await self._pair.start()

    def facts(self) -> EngineFacts:
        return self._pair.facts(long_goes_second=self._long)

    def size(self, request: GenerateRequest) -> int:
        """As the primary counts; of a prompt that it can never hold, as the secondary does."""
        return self._measure(request)[0]

    def reason_of(self, request_id: str) -> str:
        """A rule's name, known from the first token on and for a while after the last; "": the primary
        answers."""
        return self._reasons.get(request_id, "")

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Token, None]:
        """Tokens of one of the two, all from the same. Raises the primary's error, or the secondary's once it
        had begun.
        """
        if not self._pair.started or self._pair.asleep:
            raise RuntimeError("the engine sleeps" if self._pair.asleep else "the engine was not started")
        arrived = self._clock.monotonic()
        choice, trimmed, fault = self._choose(request)
        asked = choice.engine is Which.PRIMARY
        if asked:
            begun = False
            try:
                async with aclosing(self._pair.primary.generate(trimmed)) as tokens:
                    async for token in tokens:
                        begun = True
                        yield token
                return
            except Exception as error:
                choice = STAY if begun else self._after(error)
                if choice.engine is Which.PRIMARY:
                    raise
                fault = error
        if asked or fault is not None or self._pair.primary.stats().dead:
            turns = self._second(request, choice, arrived, fault)
        else:
            turns = self._second_first(request, trimmed, choice, arrived)
        async with aclosing(turns) as rest:
            async for token in rest:
                yield token

    async def _second_first(
        self, request: GenerateRequest, trimmed: GenerateRequest, choice: Choice, arrived: float
    ) -> AsyncGenerator[Token, None]:
        """The secondary's answer; the primary, which is well, gives it where the secondary refuses or fails
        before its first token."""
        begun = False
        try:
            async with aclosing(self._second(request, choice, arrived, None)) as tokens:
                async for token in tokens:
                    begun = True
                    yield token
            return
        except Exception as error:
            if begun or isinstance(error, DeadlinePassed):
                raise
            trouble = error
        self._take_back(request, choice.reason, trouble)
        left = _in_the_time_left(trimmed, self._clock.monotonic() - arrived)
        try:
            async with aclosing(self._pair.primary.generate(left)) as tokens:
                async for token in tokens:
                    begun = True
                    yield token
        except Refused as refusal:
            # It never fits here, and where it might fit it went wrong: that is what the client may try again.
            raise (trouble if refusal.status == NEVER and not begun else refusal) from trouble

    async def _second(
        self, request: GenerateRequest, choice: Choice, arrived: float, fault: Exception | None
    ) -> AsyncGenerator[Token, None]:
        """The secondary's answer. fault: what the primary said to this request before, if it was asked."""
        known = self._clock.monotonic()
        self._say(request, choice.reason, fault)
        count = self._tally.by_reason[choice.reason]
        self._tally.enter(choice.reason, known)
        begun = failed = False
        try:
            left = _in_the_time_left(request, known - arrived)
            count.switch_s += self._clock.monotonic() - known
            async with aclosing(self._pair.secondary.generate(left)) as tokens:
                async for token in tokens:
                    if not begun:
                        begun = True
                        count.first_s += self._clock.monotonic() - known
                    yield token
        except Exception as error:
            failed = True
            if fault is not None and not begun and not isinstance(error, DeadlinePassed):
                log.warning("%s: the fallback failed as well: %s", request.request_id, _name(error))
                raise fault from error
            raise
        finally:
            self._tally.leave(choice.reason, known, self._clock.monotonic(), failed=failed)

    def _measure(self, request: GenerateRequest) -> tuple[int, Refused | None]:
        """Prompt tokens, and the primary's refusal where a rule sends what it refuses to the secondary."""
        try:
            return self._pair.primary.size(request), None
        except Refused as error:
            if self._after(error).engine is Which.PRIMARY:
                raise
            refusal = error
        try:
            return self._pair.secondary.size(request), refusal
        except Refused as error:
            raise refusal from error

    def _choose(self, request: GenerateRequest) -> tuple[Choice, GenerateRequest, Exception | None]:
        """Who answers, the request as the primary would get it, and what it refuses it for already.

        A request without a length of its own (`open_ended`, or one that fills the context to its last token,
        which is what other doors make of a missing max_tokens) counts with its prompt alone, or every such
        request to a model of a long context would be a long sequence; the primary gives it what fits into its
        own context (where it only guesses what the prompt leaves, that is the server's to say).
        """
        primary, told = self._pair.primary, self.facts().context
        stats, context = primary.stats(), primary.facts().context
        prompt, refusal = self._measure(request)
        open_ended = request.open_ended or (bool(told) and prompt + request.max_tokens >= told)
        if open_ended and prompt < context < told:
            guessed = primary.facts().estimates and not request.prompt_ids
            left = context if guessed else context - prompt
            request = replace(request, max_tokens=min(request.max_tokens, left))
        facts = Facts(
            sequence_tokens=prompt + (1 if open_ended else request.max_tokens),
            context=context,
            fragmentation=stats.fragmentation,
            running=stats.running,
            fragmented=self._fragmented,
            error="engine_dead" if stats.dead else "",
            refused=refusal.code if refusal else "",
            secondary_dead=bool(self._pair.secondary.stats().dead),
        )
        self._fragmented = fragmented(self._rules, facts)
        return decide(self._rules, facts), request, refusal

    def _after(self, error: Exception) -> Choice:
        """Who answers after the primary failed before its first token."""
        if isinstance(error, DeadlinePassed):
            return STAY
        dead = bool(self._pair.secondary.stats().dead)
        if isinstance(error, Refused):
            return decide(self._rules, Facts(refused=error.code, secondary_dead=dead))
        code = error.code if isinstance(error, EngineFault) else "engine_error"
        return decide(self._rules, Facts(error=code, secondary_dead=dead))

    def _say(self, request: GenerateRequest, reason: str, fault: Exception | None) -> None:
        self._reasons[request.request_id] = reason
        self._reasons.move_to_end(request.request_id)
        if len(self._reasons) > REMEMBERED:
            self._reasons.popitem(last=False)
        so_far = self._tally.by_reason[reason].requests + 1
        # A primary that stays broken fails every request: told loudly at the 1st, 2nd, 4th, 8th ...
        loud = reason == Reason.ENGINE_ERROR and so_far & (so_far - 1) == 0
        after = f" after {_name(fault)}" if fault else ""
        level = logging.WARNING if loud else logging.INFO
        log.log(level, "%s: falls back: %s%s (%d so far)", request.request_id, reason, after, so_far)

    def _take_back(self, request: GenerateRequest, reason: str, trouble: Exception) -> None:
        """The primary answers after all: no header, no reason, and a count of its own."""
        self._reasons.pop(request.request_id, None)
        count = self._tally.by_reason[reason]
        count.returned += 1
        loud = count.returned & (count.returned - 1) == 0
        text = "%s: %s sent it to the second engine, which can't (%s): back to the first (%d so far)"
        level = logging.WARNING if loud else logging.INFO
        log.log(level, text, request.request_id, reason, _name(trouble), count.returned)

    async def sleep(self, level: int = 1) -> None:
        """Both or none."""
        await self._pair.sleep(level)

    async def wake(self) -> None:
        """Both or none."""
        await self._pair.wake()

    def stats(self) -> EngineStats:
        stands_in = any(rule.when is Reason.ENGINE_ERROR for rule in self._rules)
        both = self._pair.stats(stands_in=stands_in)
        return replace(both, extra={**both.extra, **self._tally.figures(self._clock.monotonic())})

    async def close(self) -> None:
        await self._pair.close()


def _in_the_time_left(request: GenerateRequest, spent_s: float) -> GenerateRequest:
    """Its deadline counts from when it came. Raises DeadlinePassed when that is over."""
    if request.deadline_s is None:
        return request
    left = request.deadline_s - spent_s
    if left <= 0:
        raise DeadlinePassed("the deadline passed before the fallback could take over")
    return replace(request, deadline_s=left)


def _name(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
