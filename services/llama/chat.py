"""A model's chat template: messages to the text that the model was trained on.

Law: runs somebody else's template, so in jinja2's sandbox; the names it may use are those that Hugging Face
gives (raise_exception, strftime_now, tojson, messages, add_generation_prompt, special tokens).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from regions.cli.errors import WeirError
from services.faults import Refused


class ChatTemplate:
    """tokens: special tokens by their names ("bos_token"). Raises WeirError for what is no template."""

    def __init__(
        self, source: str, tokens: Mapping[str, str], now: Callable[[], datetime] = datetime.now
    ) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        self._tokens = dict(tokens)
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise WeirError("chat template", f"line {error.lineno}: {error.message}") from error

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The chat as text, up to where the answer begins. Raises Refused (400) when the template says no:
        most often to the order of roles."""
        try:
            return self._template.render(
                messages=[dict(m) for m in messages], add_generation_prompt=True, **self._tokens
            )
        except TemplateError as error:
            message = f"the model's chat template refuses these messages: {error}"
            raise Refused(400, "invalid_messages", message, param="messages") from error


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(value: Any, indent: int | None = None) -> str:
    """Not jinja2's own, which escapes HTML: a prompt is no web page."""
    return json.dumps(value, ensure_ascii=False, indent=indent)
