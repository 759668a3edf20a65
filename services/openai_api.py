"""OpenAI's wire form, coming in: what a request may say, and what an error looks like.

Law: pure. JSON text in, a frozen value or ApiError out. Names and limits follow OpenAI's API reference
(completions, chat completions, errors); what answers look like is in services/openai_answers.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_TOKENS = 32_768
DEFAULT_MAX_TOKENS = 16
_NOT_HERE: Mapping[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "tools": (None, []),
    "functions": (None, []),
    "response_format": (None, {"type": "text"}),
}
"""Fields of OpenAI's API that this server doesn't do, each with the values that ask for nothing."""


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
    _only_plain(body)
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


def _only_plain(body: dict[str, Any]) -> None:
    """Refuse what would change the form of the answer: a client that asked for it would misread ours."""
    for name, harmless in _NOT_HERE.items():
        if body.get(name) not in harmless:
            raise ApiError(400, f"{name} is not supported here", name, "unsupported_parameter")


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
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str) or not prompt:
        raise ApiError(400, "prompt must be one non-empty string", "prompt")
    return prompt


def _messages(body: dict[str, Any]) -> str:
    messages = _typed(body, "messages", list, None)
    if not messages:
        raise ApiError(400, "messages must be a non-empty list", "messages")
    lines = []
    for i, message in enumerate(messages):
        content = _content(message) if isinstance(message, dict) else None
        if content is None or not isinstance(message.get("role"), str):
            raise ApiError(400, f"messages[{i}] needs a role and a content of text", f"messages[{i}]")
        lines.append(f"{message['role']}: {content}")
    return "\n".join(lines)


def _content(message: dict[str, Any]) -> str | None:
    """Text of one message: a string, or a list of parts that are all text. None for anything else."""
    content = message.get("content")
    if not isinstance(content, list):
        return content if isinstance(content, str) else None
    texts = [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
    return "".join(texts) if content and len(texts) == len(content) else None
