"""What an engine is built from, as a snapshot keeps it: names and options, no secret.

Law: pure. What is secret is known by its option's name, or by that of a flag in it; who rebuilds adds it from
what he was told himself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

_SECRET = re.compile("key|token$|secret|password", re.IGNORECASE)
_FLAG = re.compile(r"--[\w-]*(key|token|secret|password)[\s=]", re.IGNORECASE)
"""In an option that is more of a command line (`args=--api-key …`)."""
_VARIABLE = "_env"
"""How options end that name an environment variable: the secret is in there, the name is none."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """engine, model, options: of the first engine, as services.engines.make_engine takes them. fallback: name
    of the second, "" for none; fallback_options: its own. rules: file of fallback rules, "" for ours."""

    engine: str = ""
    model: str = ""
    options: Mapping[str, str] = field(default_factory=dict)
    fallback: str = ""
    fallback_options: Mapping[str, str] = field(default_factory=dict)
    rules: str = ""

    def public(self) -> Recipe:
        """The same without its secrets."""
        return replace(self, options=_public(self.options), fallback_options=_public(self.fallback_options))

    def with_secrets_of(self, other: Recipe) -> Recipe:
        """The same with the secrets of `other`."""
        return replace(
            self,
            options=_secrets(other.options) | dict(self.options),
            fallback_options=_secrets(other.fallback_options) | dict(self.fallback_options),
        )


def is_secret(name: str, value: str) -> bool:
    """Whether this option is kept out of snapshots."""
    return (bool(_SECRET.search(name)) and not name.endswith(_VARIABLE)) or bool(_FLAG.search(value))


def _public(options: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in options.items() if not is_secret(name, value)}


def _secrets(options: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in options.items() if is_secret(name, value)}
