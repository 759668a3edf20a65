"""One sequence on its way through the engine, as the planner and the runner see it.

Law: plain state, no tensors, no asyncio. All fields belong to the worker thread, but `cancelled`, which
anybody may set (and nobody clears).
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Sampling:
    """temperature 0: greedy. seed, sample: the dice are a function of (seed, sample, index) alone."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    sample: int = 0


@dataclass(slots=True, eq=False)
class Sequence:
    """tokens: prompt and answer. computed: how many of them have their K and V in the pool. blocks: of the
    pool, in order; the first `dropped` ones of the sequence fell out of the window and aren't among them.
    """

    tokens: list[int]
    prompt: int
    limit: int
    sampling: Sampling = Sampling()
    eos: frozenset[int] = frozenset()
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    dropped: int = 0
    cancelled: bool = False

    @property
    def pending(self) -> int:
        """Tokens to compute before the next one can be sampled; 1 while it decodes."""
        return len(self.tokens) - self.computed

    @property
    def made(self) -> int:
        return len(self.tokens) - self.prompt

    def push(self, token: int) -> str:
        """Append a sampled token; why the sequence ends with it ("stop", "length"), or empty."""
        self.tokens.append(token)
        if token in self.eos:
            return "stop"
        return "length" if self.made >= self.limit else ""
