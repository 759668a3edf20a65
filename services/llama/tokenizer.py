"""Text to token ids and back, as the model's own tokenizer.json has it.

Law: the `tokenizers` library does the work; a chat goes through the model's template, rendered in a sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Library

from regions.cli.errors import WeirError
from services.engine import Message
from services.faults import Refused
from services.llama.chat import ChatTemplate

REPLACEMENT = "\ufffd"


class Tokenizer:
    """One model's tokenizer. eos: ids that end an answer, as far as the tokenizer's files know."""

    def __init__(self, library: Library, template: ChatTemplate | None, eos: frozenset[int]) -> None:
        self._library, self._template, self.eos = library, template, eos

    @property
    def has_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt, with what the tokenizer puts in front (a BOS, where the model has one). Raises
        Refused (400) for what is no text."""
        return self._ids(text, "prompt")

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a chat up to where the assistant's answer begins. Raises Refused (400) when the template
        refuses these messages; ValueError when the model has no template."""
        if self._template is None:
            raise ValueError("this model has no chat template")
        text = self._template.render([{"role": m.role, "content": m.content} for m in messages])
        # The template writes the special tokens itself.
        return self._ids(text, "messages", special=False)

    def _ids(self, text: str, param: str, *, special: bool = True) -> list[int]:
        try:
            return list(self._library.encode(text, add_special_tokens=special).ids)
        except TypeError as error:
            # JSON can write half a surrogate pair, and Python reads it.
            why = "half a surrogate pair (U+D800 to U+DFFF) is no character"
            raise Refused(400, "invalid_text", why, param=param) from error

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens; bytes that are no whole character become U+FFFD."""
        return self._library.decode(list(ids), skip_special_tokens=True)


class Detokenizer:
    """Text of one answer, piece by piece; never part of a character.

    What a token adds depends on those before it (a leading space, the rest of a character), so each time the
    last few tokens are decoded together and what is already out is cut off.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._context = self._out = 0

    def feed(self, token: int) -> str:
        """What can be shown now; empty while a character is incomplete."""
        self._ids.append(token)
        shown = self._tokenizer.decode(self._ids[self._context : self._out])
        whole = self._tokenizer.decode(self._ids[self._context :])
        if len(whole) <= len(shown) or whole.endswith(REPLACEMENT):
            return ""
        self._context, self._out = self._out, len(self._ids)
        return whole[len(shown) :]


def load(folder: Path, eos: Sequence[int] = ()) -> Tokenizer:
    """The tokenizer of the model in `folder`. eos: what config.json says ends an answer.

    Raises WeirError naming the file that is missing or can't be read.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise WeirError(str(path), "no such file", "give a folder that holds the model's tokenizer.json")
    try:
        library = Library.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise WeirError(str(path), f"can't be read: {error}") from error
    config = read_json(folder / "tokenizer_config.json")
    generation = read_json(folder / "generation_config.json")
    more = generation.get("eos_token_id")
    ids = {*eos, *(more if isinstance(more, list) else [] if more is None else [more])}
    named = library.token_to_id(_text(config.get("eos_token")))
    return Tokenizer(library, _template(folder, config), frozenset(ids if named is None else {*ids, named}))


def read_json(path: Path) -> dict[str, Any]:
    """The object in this file, empty where there is none. Raises WeirError when it can't be read."""
    if not path.is_file():
        return {}
    try:
        body: dict[str, Any] = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise WeirError(str(path), f"no JSON: {error}") from error
    return body


def _template(folder: Path, config: dict[str, Any]) -> ChatTemplate | None:
    path = folder / "chat_template.jinja"
    source = path.read_text("utf-8") if path.is_file() else config.get("chat_template")
    if isinstance(source, list):
        named = {str(t.get("name")): t.get("template") for t in source}
        source = named.get("default")
    if not source:
        return None
    tokens = {key: _text(config.get(key)) for key in ("bos_token", "eos_token", "pad_token", "unk_token")}
    return ChatTemplate(str(source), tokens)


def _text(token: Any) -> str:
    """A special token, written as text or as an object."""
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")
