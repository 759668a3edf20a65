"""From a checked request to the sequences that an engine is to make.

Law: no work is done here, and none is refused later for what can be known now: context, ids, a deadline that
has passed. Chance is an argument.
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
        tokens = _room(ask, prompt, engine.size(job), facts)
        for sample in range(ask.n):
            name = f"{identity}-{len(made)}" if ask.choices > 1 else identity
            made.append(replace(job, request_id=name, max_tokens=tokens, sample=sample))
    return tuple(made)


def _room(ask: Ask, prompt: Prompt, size: int, facts: EngineFacts) -> int:
    """How many tokens this sequence may have. Raises ApiError (400) where the context is too short."""
    context, field = facts.context, "messages" if prompt.messages else "prompt"
    if not context:
        return ask.max_tokens or UNKNOWN_CONTEXT_TOKENS
    left = context - size
    if left < 1:
        raise _too_long(f"{field} has {size} tokens; the context is {context}, answer included", field)
    if ask.max_tokens is None:
        # With a window the cache is no bound: what falls behind is given back.
        cache = context if facts.kv_window else facts.kv_tokens // facts.kv_block * facts.kv_block or context
        return max(1, min(left, cache - size, UNSAID_TOKENS))
    if ask.max_tokens > left:
        raise _too_long(
            f"{field} has {size} tokens and max_tokens is {ask.max_tokens}; the context is {context}",
            "max_tokens",
        )
    return ask.max_tokens


def _too_long(message: str, field: str) -> ApiError:
    return ApiError(400, message, field, "context_length_exceeded")
