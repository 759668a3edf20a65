"""The Engine protocol: what an executor asks of the thing that makes tokens.

Law: types and one small door; implementations live in services/engines/, imported only when used. Wrappers
(services/batching, services/fallback) are Engines too, so that a stack of them is one more Engine.
What goes wrong is raised as one of services/faults.py.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, runtime_checkable

FIXED_PROMPT = "The river"
"""What an engine is asked before it sleeps and after: greedily, so that the same weights answer the same."""


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat; the engine renders it with its model's own template."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One sequence to generate.

    prompt: text as the client sent it; for a chat, also `messages` (then an engine with a chat template
    ignores `prompt`, which is the same chat flattened). prompt_ids: token ids instead of text. max_tokens:
    upper bound on generated tokens (>= 1). seed: the same (prompt, max_tokens, seed, temperature, sample)
    gives the same tokens on a deterministic engine. temperature 0: greedy. sample: 0-based index where a
    client asked for n > 1. deadline_s: seconds from now after which the answer is worthless; None means no
    deadline. tenant_class: its name (services/tenants.py); it decides the order in queues. ignore_eos: go
    on to max_tokens. open_ended: the client named no length; max_tokens is what the door made of that, for
    who must put something aside, and an engine that can do without it need not stop there.
    """

    request_id: str
    prompt: str
    max_tokens: int
    seed: int = 0
    stop: tuple[str, ...] = ()
    temperature: float = 0.0
    tenant_class: str = ""
    deadline_s: float | None = None
    messages: tuple[Message, ...] = ()
    prompt_ids: tuple[int, ...] = ()
    top_p: float = 1.0
    tenant: str = ""
    sample: int = 0
    ignore_eos: bool = False
    open_ended: bool = False


@dataclass(frozen=True, slots=True)
class Token:
    """One step of one sequence. `finish` is set on the last token only.

    token_id: -1 where an upstream server tells text only. text: may be empty (half a character; the end
    token). prompt_tokens: size of the prompt as the engine counts it; on the first token, or on the last
    where an upstream server tells it in the end; elsewhere it may be 0. engine: name of the engine that made
    it; set on every token, by the innermost engine.
    """

    token_id: int
    text: str
    finish: FinishReason | None = None
    prompt_tokens: int = 0
    engine: str = ""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What is fixed from `start` on.

    name: of the engine ("torch"). model: what it serves. context: tokens of prompt and answer together, 0:
    not known here. sequences: most at once, 0: no limit. kv_tokens: size of its KV cache, 0: not known.
    kv_block: tokens per block. continuous: a sequence may join while others run. sleep_levels: those it
    has. weights_bytes: on the device. device: "cpu", "cuda:0", or "" for no device of its own. kv_window:
    tokens that every layer looks back at and keeps, 0: all of them; kv_chunk: prompt tokens that it writes in
    one step, which come on top of a window. estimates: `size` of a text is a guess: good for choosing and
    for putting memory aside, while nothing may be refused or cut short by it. wake_proves: `wake` itself
    compares an answer in which every weight and the KV cache take part: nobody needs to ask again.
    """

    name: str
    model: str = ""
    context: int = 0
    sequences: int = 0
    kv_tokens: int = 0
    kv_block: int = 1
    continuous: bool = True
    sleep_levels: tuple[int, ...] = (1,)
    weights_bytes: int = 0
    device: str = ""
    kv_window: int = 0
    kv_chunk: int = 1
    estimates: bool = False
    wake_proves: bool = False


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What the engine really does at this moment.

    running, waiting: sequences. kv_used: share of the KV cache in use, 0..1. tokens, prompt_tokens,
    preemptions: since start. dead: why it is broken for good, or empty. fragmentation: share of reserved
    device memory that nothing uses, 0..1; 0 where the engine can't tell. memory_bytes: of the device, held
    now. capacity: share of its normal throughput that it believes to have (1.0 unless the cliff detector says
    otherwise). named: what the server behind it says in its own load report, by the names it has there.
    """

    running: int = 0
    waiting: int = 0
    kv_used: float = 0.0
    tokens: int = 0
    extra: dict[str, float] = field(default_factory=dict)
    prompt_tokens: int = 0
    preemptions: int = 0
    dead: str = ""
    fragmentation: float = 0.0
    memory_bytes: int = 0
    capacity: float = 1.0
    named: Mapping[str, float] = field(default_factory=dict)


@runtime_checkable
class Engine(Protocol):
    """start, generate, sleep, wake, stats, and what is fixed. Cancelling is closing the iterator of
    `generate`.
    """

    async def start(self) -> None:
        """Load and be ready to generate. Raises on failure; calling it twice is an error."""

    def facts(self) -> EngineFacts:
        """Good from `start` on."""

    def size(self, request: GenerateRequest) -> int:
        """Prompt tokens as this engine counts them; ids exactly, a text too unless facts say `estimates`.
        Raises Refused (400) for ids outside the vocabulary and the like. Cheap: it is called on the loop,
        more than once, before anything is queued."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Token, None]:
        """Tokens of one sequence, as they are made. Closing the iterator cancels and frees slot and KV."""

    async def sleep(self, level: int = 1) -> None:
        """Give memory back (1: weights parked, 2: weights dropped). Raises RuntimeError while anything
        runs.
        """

    async def wake(self) -> None:
        """Undo sleep; the engine generates the same tokens as before. Raises WakeFailed and stays asleep."""

    def stats(self) -> EngineStats:
        """Cheap and never raises, asleep or dead."""

    async def close(self) -> None:
        """Give everything back: memory, threads, child processes. Fine to call twice, started or not."""
