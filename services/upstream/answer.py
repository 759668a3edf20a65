"""A streamed answer, read event by event: what tokens it stands for.

Law: pure. Event data in, Tokens out. A server may put several tokens in one event, or tell the end apart from
the last token; counts stay right all the same: an event with ids is as many tokens as it has ids, one without
is one. The last token is held until the stream has said all it has to say (`end`).
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from services.engine import FinishReason, Token
from services.faults import EngineFault, Refused

DONE = "[DONE]"
_UNTOLD = -1
_FINISH = {"length": FinishReason.LENGTH}
_LOST = ("abort", "error")
"""vLLM's words for a sequence that it gave up."""


class Answer:
    """One answer. engine: its name, for the tokens. max_tokens: as asked, 0: not at all. tokens: so far."""

    def __init__(self, engine: str, max_tokens: int) -> None:
        self._engine, self._max = engine, max_tokens
        self._held: Token | None = None
        self._finish: FinishReason | None = None
        self.prompt_tokens = self.completion_tokens = self.tokens = 0
        self.done = False

    def event(self, data: str) -> list[Token]:
        """Tokens of one event. Raises EngineFault for an error that the server tells in the stream, or for
        what is no answer of this API."""
        if data == DONE:
            self.done = True
            return []
        body = _document(data)
        if error := body.get("error"):
            raise _told(error)
        self._count(body)
        choices = body.get("choices")
        if not isinstance(choices, list):
            raise EngineFault(f"the server sent what is no answer: {data[:200]!r}")
        if choices and not isinstance(choices[0], dict):
            raise EngineFault(f"the server sent what is no answer: {data[:200]!r}")
        return self._choice(choices[0]) if choices else []

    def end(self) -> Token:
        """The last token, when the stream has ended. Raises EngineFault if it ended too early."""
        if self._finish is None:
            raise EngineFault(f"the server's answer broke off after {self.tokens} tokens")
        last = self._held or Token(_UNTOLD, "", None, 0, self._engine)
        # Only on the first token does anybody look for it before the end.
        return replace(last, finish=self._finish, prompt_tokens=self.prompt_tokens)

    def _count(self, body: dict[str, Any]) -> None:
        usage = body.get("usage")
        if isinstance(usage, dict):
            self.prompt_tokens = _whole(usage.get("prompt_tokens")) or self.prompt_tokens
            self.completion_tokens = _whole(usage.get("completion_tokens")) or self.completion_tokens
        # A chat's come with the event, a completion's with its choice.
        self._prompt_ids(body)

    def _prompt_ids(self, part: dict[str, Any]) -> None:
        ids = part.get("prompt_token_ids")
        if isinstance(ids, list):
            self.prompt_tokens = len(ids) or self.prompt_tokens

    def _choice(self, choice: dict[str, Any]) -> list[Token]:
        self._prompt_ids(choice)
        delta = choice.get("delta")
        text = delta.get("content") if isinstance(delta, dict) else choice.get("text")
        made = self._steps(text if isinstance(text, str) else "", choice.get("token_ids"))
        reason = str(choice.get("finish_reason") or "")
        if reason in _LOST:
            raise EngineFault(f"the server gave the sequence up: {reason}")
        if reason:
            self._finish = _FINISH.get(reason, FinishReason.STOP)
        return self._give(made)

    def _steps(self, text: str, ids: Any) -> list[Token]:
        known = [one for one in ids if isinstance(one, int)] if isinstance(ids, list) else []
        if not known:
            return [Token(_UNTOLD, text, None, self.prompt_tokens, self._engine)] if text else []
        # Which part of the text is whose can't be told: it is whole with the last one.
        texts = [""] * (len(known) - 1) + [text]
        return [
            Token(one, part, None, self.prompt_tokens, self._engine)
            for one, part in zip(known, texts, strict=True)
        ]

    def _give(self, made: list[Token]) -> list[Token]:
        """All but what may be the last token. Where the server tells the end apart, that is the one that
        reaches max_tokens; waiting for the end behind it costs nothing, since no token is to come."""
        out = [self._held] if self._held is not None and made else []
        self._held = None if made else self._held
        self.tokens += len(made)
        if made and (self._finish is not None or 0 < self._max <= self.tokens):
            self._held = made.pop()
        return out + made


def _document(data: str) -> dict[str, Any]:
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise EngineFault(f"the server sent what is no answer: {data[:200]!r}")
    return body


def _told(error: Any) -> EngineFault:
    """An error in the middle of a stream. The status has gone out as 200 by then: what the server would have
    answered else is in `code`."""
    said = error if isinstance(error, dict) else {"message": str(error)}
    message = str(said.get("message") or "no reason given")[:500]
    if str(said.get("code")) == "400":
        param = said.get("param")
        return Refused(400, "invalid_request", message, param=param if isinstance(param, str) else None)
    return EngineFault(f"the server failed: {message}")


def _whole(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
