"""OpenAI's wire form: what a request may say and what answers and errors look like.

Law: pure. JSON text in, frozen values or ApiError out; values out, JSON bytes ready to send. Names and limits
follow OpenAI's API reference (completions, chat completions, errors).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

MAX_TOKENS = 32_768
DEFAULT_MAX_TOKENS = 16
DONE = b"data: [DONE]\n\n"


class ApiError(Exception):
    """An error in OpenAI's form. status: HTTP status; param: the field at fault, if one is."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        self.status, self.message, self.param, self.code = status, message, param, code
        super().__init__(message)

    def body(self) -> bytes:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return json.dumps({"error": error}).encode()


@dataclass(frozen=True, slots=True)
class Ask:
    """A checked request. chat: /v1/chat/completions."""

    chat: bool
    model: str
    prompt: str
    max_tokens: int
    seed: int
    stream: bool
    stop: tuple[str, ...]
    temperature: float
    include_usage: bool


def parse(raw: bytes, *, chat: bool, model: str) -> Ask:
    """The request in `raw`. Raises ApiError (400, 404 for an unknown model) naming the field."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        raise ApiError(400, "the body is not JSON") from None
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    wanted = _typed(body, "model", str, model)
    if wanted != model:
        raise ApiError(
            404,
            f"the model {wanted[:80]!r} does not exist here; there is {model!r}",
            "model",
            "model_not_found",
        )
    if _whole(body, "n", 1) != 1:
        raise ApiError(400, "n must be 1: one answer per request", "n")
    limit = "max_completion_tokens" if chat and "max_completion_tokens" in body else "max_tokens"
    tokens = _whole(body, limit, DEFAULT_MAX_TOKENS)
    if not 1 <= tokens <= MAX_TOKENS:
        raise ApiError(400, f"{limit} must be between 1 and {MAX_TOKENS}, not {tokens}", limit)
    options = _typed(body, "stream_options", dict, {}) or {}
    return Ask(
        chat=chat,
        model=model,
        prompt=_messages(body) if chat else _prompt(body),
        max_tokens=tokens,
        seed=_whole(body, "seed", 0),
        stream=_typed(body, "stream", bool, False),
        stop=_stop(body),
        temperature=_temperature(body),
        include_usage=bool(options.get("include_usage")),
    )


def _typed(body: dict[str, Any], name: str, kind: type, default: Any) -> Any:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kind):
        raise ApiError(400, f"{name} must be of type {kind.__name__}", name)
    return value


def _whole(body: dict[str, Any], name: str, default: int) -> int:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise ApiError(400, f"{name} must be an integer", name)
    return value


def _temperature(body: dict[str, Any]) -> float:
    value = body.get("temperature")
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 2:
        raise ApiError(400, "temperature must be a number between 0 and 2", "temperature")
    return float(value)


def _stop(body: dict[str, Any]) -> tuple[str, ...]:
    value = body.get("stop")
    words = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(words, list) or not all(isinstance(w, str) and w for w in words) or len(words) > 4:
        raise ApiError(400, "stop must be a string or a list of up to 4 non-empty strings", "stop")
    return tuple(words)


def _prompt(body: dict[str, Any]) -> str:
    prompt = _typed(body, "prompt", str, None)
    if not prompt:
        raise ApiError(400, "prompt must be a non-empty string", "prompt")
    return str(prompt)


def _messages(body: dict[str, Any]) -> str:
    messages = _typed(body, "messages", list, None)
    if not messages:
        raise ApiError(400, "messages must be a non-empty list", "messages")
    lines = []
    for i, message in enumerate(messages):
        good = isinstance(message, dict) and isinstance(message.get("role"), str)
        if not good or not isinstance(message.get("content"), str):
            raise ApiError(400, f"messages[{i}] needs a role and a content, both strings", f"messages[{i}]")
        lines.append(f"{message['role']}: {message['content']}")
    return "\n".join(lines)


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
