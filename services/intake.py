"""From a checked request to the sequences that an engine is to make.

Law: no work is done here, and none is refused later for what can be known now: context, ids, a deadline that
has passed. What is only guessed refuses nothing and shortens nothing. Chance is an argument.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from services.caller import Caller
from services.engine import Engine, EngineFacts, GenerateRequest
from services.generation import too_late
from services.openai_api import Ask, Prompt
from services.openai_fields import INT64, ApiError

UNKNOWN_CONTEXT_TOKENS = 256
"""max_tokens of a chat that doesn't say, where the engine doesn't know how long its context is."""
UNSAID_TOKENS = 4096
"""And where it does know: what is left of context and cache, but no more than this. Schedulers put KV aside
for the longest answer a request may get, so that one who didn't think of it would keep others out."""


def jobs(
    ask: Ask, engine: Engine, caller: Caller, identity: str, chance: Callable[[], int]
) -> tuple[GenerateRequest, ...]:
    """One sequence per choice, in the order of their indexes: all of the first prompt, then of the next.

    chance: a fresh number of 63 bits. Raises ApiError (400, 408, 504) and Refused.
    """
    deadline = caller.deadline_s if ask.stream else caller.first_byte_s
    if deadline == 0 or caller.first_byte_s == 0:
        raise too_late("the deadline had passed when the request came", own=caller.own_limit)
    seed = ask.seed if ask.seed is not None else chance() if ask.temperature > 0 else 0
    facts, made = engine.facts(), list[GenerateRequest]()
    for prompt in ask.prompts:
        job = GenerateRequest(
            request_id=f"{identity}-{len(made)}" if ask.choices > 1 else identity,
            prompt=prompt.text,
            prompt_ids=prompt.ids,
            messages=prompt.messages,
            max_tokens=1,
            seed=seed % INT64,
            stop=ask.stop,
            temperature=ask.temperature,
            top_p=ask.top_p,
            tenant=caller.tenant.name,
            tenant_class=caller.tenant.tenant_class,
            deadline_s=deadline,
            ignore_eos=ask.ignore_eos,
            open_ended=ask.max_tokens is None,
        )
        size = engine.size(job)
        tokens = (_likely if facts.estimates and not prompt.ids else _room)(ask, prompt, size, facts)
        for sample in range(ask.n):
            name = f"{identity}-{len(made)}" if ask.choices > 1 else identity
            made.append(replace(job, request_id=name, max_tokens=tokens, sample=sample))
    return tuple(made)


def _room(ask: Ask, prompt: Prompt, size: int, facts: EngineFacts) -> int:
    """How many tokens this sequence may have, size being known. As with vLLM (get_max_tokens in 0.32), who
    asks for more than is left behind the prompt gets what is left. Raises ApiError (400) where that is
    nothing, or where even an empty prompt would leave less than was asked for."""
    context, field = facts.context, "messages" if prompt.messages else "prompt"
    asked = _asked(ask, context)
    if not context:
        return asked or UNKNOWN_CONTEXT_TOKENS
    left = context - size
    if left < 1:
        raise _too_long(f"{field} has {size} tokens; the context is {context}, answer included", field)
    return min(asked, left) if asked else max(1, min(left, _cache(facts) - size, UNSAID_TOKENS))


def _likely(ask: Ask, _: Prompt, size: int, facts: EngineFacts) -> int:
    """The same, size being a guess: the length as asked, for the server to judge; for one that wasn't named,
    a bound that the scheduler can count with."""
    context = facts.context
    if asked := _asked(ask, context):
        return asked
    least = min(context, UNKNOWN_CONTEXT_TOKENS) or UNKNOWN_CONTEXT_TOKENS
    return max(least, min(context - size, _cache(facts) - size, UNSAID_TOKENS))


def _asked(ask: Ask, context: int) -> int:
    """0: no length was named. Raises ApiError."""
    if ask.max_tokens is not None and 0 < context < ask.max_tokens:
        raise _too_long(f"max_tokens is {ask.max_tokens}; the context is {context}", "max_tokens")
    return ask.max_tokens or 0


def _cache(facts: EngineFacts) -> int:
    """Tokens that one sequence may have in the KV cache. With a window it is no bound: what falls behind is
    given back."""
    whole = facts.kv_tokens // facts.kv_block * facts.kv_block
    return facts.context if facts.kv_window or not whole else whole


def _too_long(message: str, field: str) -> ApiError:
    return ApiError(400, message, field, "context_length_exceeded")
