"""How many tokens a prompt is, before the server has counted it.

Law: pure. Ids are counted; a text is guessed by its bytes, at the rate that the server's own counts have
shown so far. Nothing may be refused by a guess (EngineFacts.estimates).

Why no exact count: short prompts, where it is cheap, are those that nothing depends on; at the 8192 tokens
of the fallback's rule a tokenizer holds up every running stream for some 17 ms each time (measured), and
asking the server costs a round trip before the first token. The guess comes within a few per cent after some
answers, and what must be exact (context, usage) is the server's affair anyway.
"""

from __future__ import annotations

from services.engine import GenerateRequest

BYTES_PER_TOKEN = 4.0
"""Until the server has counted: English and code through today's vocabularies."""
LEARNT_BYTES = 256
"""Shorter prompts teach nothing: most of them is the chat template."""
TRUST_TOKENS = 256
"""What the first guess weighs against what was counted."""
MEMORY_TOKENS = 200_000
"""Of what was counted so much is kept, older counts weighing less: traffic changes."""


class Ruler:
    """Of one server."""

    def __init__(self) -> None:
        self._tokens = float(TRUST_TOKENS)
        self._bytes = TRUST_TOKENS * BYTES_PER_TOKEN

    def size(self, request: GenerateRequest) -> int:
        """Prompt tokens; of a text never 0."""
        if request.prompt_ids:
            return len(request.prompt_ids)
        return max(1, round(text_bytes(request) * self._tokens / self._bytes))

    def learn(self, request: GenerateRequest, counted: int) -> None:
        """counted: prompt tokens as the server told them; 0: it didn't."""
        size = 0 if request.prompt_ids else text_bytes(request)
        if size < LEARNT_BYTES or counted < 1:
            return
        self._tokens, self._bytes = self._tokens + counted, self._bytes + size
        if self._tokens > MEMORY_TOKENS:
            self._tokens, self._bytes = self._tokens / 2, self._bytes / 2


def text_bytes(request: GenerateRequest) -> int:
    """Of the text; a chat's is there flattened, roles included."""
    text = request.prompt
    return len(text) if text.isascii() else len(text.encode("utf-8", "replace"))
