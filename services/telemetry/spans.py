"""What stands in a request's span.

Law: pure; names come from services/telemetry/genai.py. Never a prompt, never an answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from services.generation import Generation
from services.instance import Identity
from services.openai_api import Ask
from services.telemetry import genai
from services.telemetry.trace import Attribute

Attributes = dict[str, Attribute]


def name(chat: bool, model: str) -> str:
    return f"{genai.CHAT if chat else genai.COMPLETION} {model}"


def resource(who: Identity) -> dict[str, str]:
    """Of the whole process."""
    return {
        "service.name": who.service,
        "service.instance.id": who.instance,
        "service.version": who.version,
        "cloud.region": who.region,
        "cloud.availability_zone": who.zone,
        genai.STAGE: who.stage,
    }


def request(chat: bool, who: Identity, request_id: str, tenant: str) -> Attributes:
    """Known before the body is read."""
    return {
        genai.OPERATION_NAME: genai.CHAT if chat else genai.COMPLETION,
        genai.PROVIDER_NAME: genai.PROVIDER,
        genai.REQUEST_MODEL: who.model,
        genai.REQUEST_ID: request_id,
        genai.TENANT: tenant,
        genai.REGION: who.region,
        genai.STAGE: who.stage,
        genai.INSTANCE: who.instance,
    }


def ask(it: Ask, identity: str) -> Attributes:
    """Known once it is read."""
    asked: Attributes = {
        genai.RESPONSE_ID: identity,
        genai.RESPONSE_MODEL: it.model,
        genai.REQUEST_TEMPERATURE: it.temperature,
        genai.REQUEST_TOP_P: it.top_p,
        genai.REQUEST_STREAM: it.stream,
    }
    if it.max_tokens is not None:
        asked[genai.REQUEST_MAX_TOKENS] = it.max_tokens
    if it.seed is not None:
        asked[genai.REQUEST_SEED] = it.seed
    if it.stop:
        asked[genai.REQUEST_STOP_SEQUENCES] = it.stop
    if it.choices > 1:
        asked[genai.REQUEST_CHOICE_COUNT] = it.choices
    return asked


def made(parts: Sequence[Generation], used: Mapping[str, int], first_s: float | None) -> Attributes:
    """Known at the end. first_s: from the request to its first token."""
    known: Attributes = {
        genai.USAGE_INPUT_TOKENS: used["prompt_tokens"],
        genai.USAGE_OUTPUT_TOKENS: used["completion_tokens"],
        genai.RESPONSE_FINISH_REASONS: tuple(part.finish or "error" for part in parts),
    }
    if first_s is not None:
        known[genai.RESPONSE_TIME_TO_FIRST_CHUNK] = first_s
    if engine := next((part.engine for part in parts if part.engine), ""):
        known[genai.ENGINE] = engine
    return known


def status(code: int) -> Attributes:
    return {genai.STATUS_CODE: code}
