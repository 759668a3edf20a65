"""What an executor's answers are made with, as far as it can be set.

Law: a frozen value; no HTTP, so that a command line can show it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AnswerSettings:
    """write_s: how long a write to a client may stand still; then the client is cut, for what comes after
    waits in memory, and in the end in the engine. Raises ValueError for values that make no sense.
    """

    write_s: float = 30.0

    def __post_init__(self) -> None:
        if not self.write_s > 0:
            raise ValueError(f"write_s = {self.write_s:g}: more than 0")
