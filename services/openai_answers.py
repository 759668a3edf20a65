"""OpenAI's wire form, going out: answers whole or in SSE events.

Law: pure. Values in, bytes ready to send out.
"""

from __future__ import annotations

import json
from typing import Any

from services.openai_api import Ask

DONE = b"data: [DONE]\n\n"


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    total = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}


def whole(ask: Ask, identity: str, created: int, text: str, finish: str, used: dict[str, int]) -> bytes:
    """The body of an answer that is not streamed."""
    kind = "chat.completion" if ask.chat else "text_completion"
    content: dict[str, Any] = (
        {"message": {"role": "assistant", "content": text}} if ask.chat else {"text": text}
    )
    choice = {"index": 0, **content, "logprobs": None, "finish_reason": finish}
    head = {"id": identity, "object": kind, "created": created, "model": ask.model}
    return json.dumps({**head, "choices": [choice], "usage": used}).encode()


def chunk(ask: Ask, identity: str, created: int, text: str, finish: str | None, first: bool) -> bytes:
    """One SSE event of a streamed answer."""
    kind = "chat.completion.chunk" if ask.chat else "text_completion"
    delta: dict[str, Any] = {"role": "assistant", "content": text} if first else {"content": text}
    content: dict[str, Any] = {"delta": delta} if ask.chat else {"text": text}
    choice = {"index": 0, **content, "logprobs": None, "finish_reason": finish}
    head = {"id": identity, "object": kind, "created": created, "model": ask.model}
    return _event({**head, "choices": [choice]})


def usage_chunk(ask: Ask, identity: str, created: int, used: dict[str, int]) -> bytes:
    kind = "chat.completion.chunk" if ask.chat else "text_completion"
    return _event(
        {"id": identity, "object": kind, "created": created, "model": ask.model, "choices": [], "usage": used}
    )


def failure_chunk(message: str) -> bytes:
    """What a client sees when an answer that has begun can't be finished; no [DONE] follows."""
    return _event({"error": {"message": message, "type": "server_error", "param": None, "code": None}})


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"
