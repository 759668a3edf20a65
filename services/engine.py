"""The Engine protocol: what an executor asks of the thing that makes tokens.

Law: a small door of five verbs; implementations live in services/engines/, imported only when used.
The execution-tier issue adds real engines behind the same door.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, runtime_checkable


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One sequence to generate.

    prompt: text as the client sent it. max_tokens: upper bound on generated tokens (>= 1).
    seed: the same (prompt, max_tokens, seed) gives the same tokens on a deterministic engine.
    deadline_s: seconds from now after which the request is worthless; None means no deadline.
    """

    request_id: str
    prompt: str
    max_tokens: int
    seed: int = 0
    stop: tuple[str, ...] = ()
    temperature: float = 0.0
    tenant_class: str = ""
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True)
class Token:
    """One step of one sequence. `finish` is set on the last token only.

    prompt_tokens: size of the prompt as the engine counts it; on the first token, elsewhere it may be 0.
    """

    token_id: int
    text: str
    finish: FinishReason | None = None
    prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What the engine really does at this moment.

    running, waiting: sequences. kv_used: share of the KV cache in use, 0..1. tokens: generated since start.
    """

    running: int = 0
    waiting: int = 0
    kv_used: float = 0.0
    tokens: int = 0
    extra: dict[str, float] = field(default_factory=dict)


@runtime_checkable
class Engine(Protocol):
    """start, generate, sleep, wake, stats. Cancelling is closing the iterator that `generate` gave."""

    async def start(self) -> None:
        """Load and be ready to generate. Raises on failure; calling it twice is an error."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Token, None]:
        """Tokens of one sequence, as they are made. Closing the iterator cancels and frees its slot."""

    async def sleep(self, level: int = 1) -> None:
        """Give memory back (1: weights parked, 2: weights dropped). Only when nothing runs."""

    async def wake(self) -> None:
        """Undo sleep; the engine generates the same tokens as before."""

    def stats(self) -> EngineStats: ...
