"""What the stand-in for vLLM computes: ids from text, tokens from ids.

Law: pure. A token is a function of (prompt ids, seed, index): greedy ones don't depend on the seed, as in
vLLM.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

_NOUNS = "water river weir stream flow gate basin canal delta spring source mouth bank reed stone lock"
WORDS = tuple(_NOUNS.split())
BYTES = 256
EOS = BYTES + len(WORDS)
VOCABULARY = EOS + 1
ENDS_ONE_IN = 61


def ids_of(text: str) -> list[int]:
    """One id per byte."""
    return list(text.encode("utf-8", "replace"))


def text_of(token: int, index: int) -> str:
    if token == EOS:
        return ""
    return (" " if index else "") + WORDS[token - BYTES]


def tokens(prompt: Sequence[int], seed: int, temperature: float, *, ends: bool) -> Iterator[int]:
    """Token ids without end, or to EOS where `ends`."""
    salt = seed if temperature > 0 else 0
    base = hashlib.blake2b(repr((tuple(prompt), salt)).encode(), digest_size=8)
    index = 0
    while True:
        state = base.copy()
        state.update(b"\0%d" % index)
        number = int.from_bytes(state.digest(), "big")
        if ends and index and number % ENDS_ONE_IN == 0:
            yield EOS
            return
        yield BYTES + number % len(WORDS)
        index += 1
