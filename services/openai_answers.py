"""OpenAI's wire form, going out: answers whole or in SSE events.

Law: pure. Values in, bytes ready to send out. What is the same in every event of an answer is encoded once.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring_ascii
from typing import Any

from services.openai_api import Ask

DONE = b"data: [DONE]\n\n"
Usage = dict[str, int]


def usage(prompt_tokens: int, completion_tokens: int) -> Usage:
    total = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}


@dataclass(slots=True)
class Choice:
    """One choice as far as it is known. ids: of its tokens; an id below 0 means that only the upstream server
    knows them."""

    index: int
    texts: list[str] = field(default_factory=list)
    finish: str = ""
    ids: list[int] = field(default_factory=list)


def known(ids: Sequence[int]) -> list[int] | None:
    """The ids, or None if any of them isn't known: a list with gaps would be taken for the whole."""
    return list(ids) if all(one >= 0 for one in ids) else None


def whole(ask: Ask, identity: str, created: int, choices: Sequence[Choice], used: Usage) -> bytes:
    """The body of an answer that is not streamed."""
    kind = "chat.completion" if ask.chat else "text_completion"
    head = {"id": identity, "object": kind, "created": created, "model": ask.model}
    return json.dumps({**head, "choices": [_choice(ask, one) for one in choices], "usage": used}).encode()


def _choice(ask: Ask, it: Choice) -> dict[str, Any]:
    text = "".join(it.texts)
    content: dict[str, Any] = (
        {"message": {"role": "assistant", "content": text}} if ask.chat else {"text": text}
    )
    ids = {"token_ids": known(it.ids)} if ask.token_ids else {}
    return {"index": it.index, **content, "logprobs": None, "finish_reason": it.finish, **ids}


class Events:
    """The SSE events of one streamed answer."""

    def __init__(self, ask: Ask, identity: str, created: int) -> None:
        kind = "chat.completion.chunk" if ask.chat else "text_completion"
        self._head = {"id": identity, "object": kind, "created": created, "model": ask.model}
        self._chat, self._with_ids = ask.chat, ask.token_ids
        start = "data: " + json.dumps(self._head, separators=(",", ":"))[:-1] + ',"choices":[{"index":'
        self._starts = tuple(f"{start}{index}," for index in range(ask.choices))
        self._begun = [False] * ask.choices

    def begun(self, index: int) -> bool:
        """Whether this choice has had an event: the first one comes even without text."""
        return self._begun[index]

    def event(self, index: int, text: str, finish: str | None, ids: Sequence[int] = ()) -> bytes:
        """The next piece of one choice."""
        body = encode_basestring_ascii(text)
        if not self._chat:
            content = f'"text":{body}'
        elif self._begun[index]:
            content = f'"delta":{{"content":{body}}}'
        else:
            content = f'"delta":{{"role":"assistant","content":{body}}}'
        self._begun[index] = True
        end = f'"{finish}"' if finish else "null"
        if self._with_ids:
            end += ',"token_ids":' + json.dumps(known(ids), separators=(",", ":"))
        text = f'{self._starts[index]}{content},"logprobs":null,"finish_reason":{end}}}]}}\n\n'
        return text.encode()

    def usage(self, used: Usage) -> bytes:
        """The last event before [DONE], if it was asked for."""
        return _event({**self._head, "choices": [], "usage": used})


def failure(message: str, code: str | None) -> bytes:
    """What a client sees when an answer that has begun can't be finished; no [DONE] follows."""
    return _event({"error": {"message": message, "type": "server_error", "param": None, "code": code}})


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"
