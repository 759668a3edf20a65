"""OpenAI's wire form, coming in: what a request may say.

Law: pure. JSON text in, a frozen value or ApiError out. Names and limits follow OpenAI's API reference
(completions, chat completions, errors) and, for `ignore_eos` and `return_token_ids`, vLLM's; what answers
look like is in services/openai_answers.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.engine import Message
from services.openai_fields import INT64, ApiError, document, number, typed, whole

__all__ = ["MAX_CHOICES", "MAX_N", "MAX_TOKENS", "ApiError", "Ask", "Prompt", "parse"]

MAX_TOKENS = 1_048_576
"""What may be asked for at all; what a model's context leaves is checked where the model is known."""
TEXT_TOKENS = 16
"""max_tokens of a completion that doesn't say (OpenAI's own default)."""
MAX_N, MAX_PROMPTS, MAX_CHOICES = 16, 64, 128
MAX_STOPS, MAX_STOP_CHARS = 4, 1024
MAX_TOKEN_ID = 2**31 - 1
_NOT_HERE: Mapping[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "tools": (None, []),
    "functions": (None, []),
    "response_format": (None, {"type": "text"}),
    "presence_penalty": (None, 0, 0.0),
    "frequency_penalty": (None, 0, 0.0),
    "logit_bias": (None, {}),
}
"""Fields of OpenAI's API that this server doesn't do, each with the values that ask for nothing (by type too:
`logprobs` 0 asks for something, false doesn't)."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One thing to continue: text, or token ids (then the text is empty), or the turns of a chat with the
    same flattened in `text`."""

    text: str = ""
    ids: tuple[int, ...] = ()
    messages: tuple[Message, ...] = ()


@dataclass(frozen=True, slots=True)
class Ask:
    """A checked request. chat: /v1/chat/completions. n: choices per prompt. max_tokens: None means as much as
    the context leaves. seed: None means that chance decides."""

    chat: bool
    model: str
    prompts: tuple[Prompt, ...]
    n: int
    max_tokens: int | None
    seed: int | None
    stream: bool
    stop: tuple[str, ...]
    temperature: float
    top_p: float
    include_usage: bool
    ignore_eos: bool
    token_ids: bool

    @property
    def choices(self) -> int:
        return self.n * len(self.prompts)


def parse(raw: bytes, *, chat: bool, model: str) -> Ask:
    """The request in `raw`. Raises ApiError (400, 404 for an unknown model) naming the field."""
    body = document(raw)
    wanted = typed(body, "model", str, model)
    if wanted != model:
        raise no_such_model(wanted, model)
    for name, harmless in _NOT_HERE.items():
        # What would change the answer's form or meaning is refused: a client would misread what it gets.
        if not any(value == body.get(name) and type(value) is type(body.get(name)) for value in harmless):
            raise ApiError(400, f"{name} is not supported here", name, "unsupported_parameter")
    options = typed(body, "stream_options", dict, {})
    temperature, top_p = number(body, "temperature", 0, 2), number(body, "top_p", 0, 1)
    ask = Ask(
        chat=chat,
        model=model,
        prompts=(_chat(body),) if chat else _prompts(body.get("prompt")),
        n=whole(body, "n", 1, MAX_N) or 1,
        max_tokens=_max_tokens(body, chat),
        seed=whole(body, "seed", -INT64, INT64 - 1),
        stream=typed(body, "stream", bool, False),
        stop=_stop(body),
        temperature=1.0 if temperature is None else temperature,
        top_p=1.0 if top_p is None else top_p,
        include_usage=bool(options.get("include_usage")),
        ignore_eos=typed(body, "ignore_eos", bool, False),
        token_ids=typed(body, "return_token_ids", bool, False),
    )
    if not ask.top_p:
        raise ApiError(400, "top_p must be more than 0", "top_p")
    if ask.choices > MAX_CHOICES:
        raise ApiError(400, f"prompt times n: at most {MAX_CHOICES} choices, not {ask.choices}", "n")
    return ask


def no_such_model(wanted: str, there_is: str) -> ApiError:
    return ApiError(
        404,
        f"the model {wanted[:80]!r} does not exist here; there is {there_is!r}",
        "model",
        "model_not_found",
    )


def _max_tokens(body: dict[str, Any], chat: bool) -> int | None:
    for name in ("max_completion_tokens", "max_tokens") if chat else ("max_tokens",):
        if (tokens := whole(body, name, 1, MAX_TOKENS)) is not None:
            return tokens
    return None if chat else TEXT_TOKENS


def _stop(body: dict[str, Any]) -> tuple[str, ...]:
    value = body.get("stop")
    words = [] if value is None else [value] if isinstance(value, str) else value
    good = isinstance(words, list) and len(words) <= MAX_STOPS
    if not good or not all(isinstance(w, str) and 0 < len(w) <= MAX_STOP_CHARS for w in words):
        raise ApiError(
            400,
            f"stop must be a string or a list of up to {MAX_STOPS}, each of 1 to {MAX_STOP_CHARS} characters",
            "stop",
        )
    return tuple(words)


def _prompts(value: Any) -> tuple[Prompt, ...]:
    """A text, a list of token ids, or a list of texts or of such lists."""
    if isinstance(value, list) and value and not _is_ids(value):
        if len(value) > MAX_PROMPTS:
            raise ApiError(400, f"prompt: at most {MAX_PROMPTS} of them, not {len(value)}", "prompt")
        return tuple(_prompt(one) for one in value)
    return (_prompt(value),)


def _prompt(value: Any) -> Prompt:
    if isinstance(value, str) and value:
        return Prompt(value)
    if _is_ids(value):
        return Prompt(ids=tuple(value))
    raise ApiError(
        400, "prompt must be a non-empty text or list of token ids, or a list of several of these", "prompt"
    )


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(_is_id(one) for one in value)


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_TOKEN_ID


def _chat(body: dict[str, Any]) -> Prompt:
    messages = typed(body, "messages", list, None)
    if not messages:
        raise ApiError(400, "messages must be a non-empty list", "messages")
    turns = []
    for i, message in enumerate(messages):
        content = _content(message) if isinstance(message, dict) else None
        if content is None or not isinstance(message.get("role"), str):
            raise ApiError(400, f"messages[{i}] needs a role and a content of text", f"messages[{i}]")
        turns.append(Message(message["role"], content))
    return Prompt("\n".join(f"{turn.role}: {turn.content}" for turn in turns), messages=tuple(turns))


def _content(message: dict[str, Any]) -> str | None:
    """Text of one message: a string, or a list of parts that are all text. None for anything else."""
    content = message.get("content")
    if not isinstance(content, list):
        return content if isinstance(content, str) else None
    texts = [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
    return "".join(texts) if content and len(texts) == len(content) else None
