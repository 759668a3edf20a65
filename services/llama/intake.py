"""From a request to a sequence: ids, limits, and what is refused before any work is done.

Law: no torch; the tokenizer's answers are kept for a while, because a request is sized before it is run.
"""

from __future__ import annotations

from collections import OrderedDict

from services.engine import GenerateRequest
from services.faults import Refused
from services.llama.sequence import Sampling, Sequence
from services.llama.tokenizer import Tokenizer

KEPT = 256
"""Requests whose ids are remembered between `size` and `sequence`."""


class Intake:
    """context: tokens of prompt and answer together, as far as the model and the KV cache allow."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, context: int, seed: int = 0) -> None:
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        self._context, self._seed = context, seed
        self._kept: OrderedDict[object, tuple[int, ...]] = OrderedDict()

    def ids(self, request: GenerateRequest) -> tuple[int, ...]:
        """Prompt ids. Raises Refused (400): ids outside the vocabulary, nothing at all, or no room for even
        one token of an answer."""
        if request.prompt_ids:
            found = request.prompt_ids
            self._check_vocabulary(found)
        else:
            found = self._text_ids(request)
        if not found:
            raise Refused(400, "empty_prompt", "the prompt has no tokens", param="prompt")
        if len(found) >= self._context:
            raise self._too_long(len(found), 1, "prompt")
        return found

    def sequence(self, request: GenerateRequest) -> Sequence:
        """Ready to run. Raises Refused (400), also where prompt and max_tokens don't fit together."""
        ids = self.ids(request)
        if request.max_tokens < 1:
            raise Refused(400, "invalid_max_tokens", "max_tokens must be at least 1", param="max_tokens")
        if len(ids) + request.max_tokens > self._context:
            raise self._too_long(len(ids), request.max_tokens, "max_tokens")
        how = Sampling(request.temperature, request.top_p, request.seed + self._seed, request.sample)
        eos = frozenset() if request.ignore_eos else self._tokenizer.eos
        return Sequence(list(ids), len(ids), request.max_tokens, how, eos)

    def _text_ids(self, request: GenerateRequest) -> tuple[int, ...]:
        key = _key(request)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        if request.messages and self._tokenizer.has_template:
            found = tuple(self._tokenizer.chat(request.messages))
        else:
            found = tuple(self._tokenizer.encode(request.prompt))
        self._kept[key] = found
        if len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return found

    def _check_vocabulary(self, ids: tuple[int, ...]) -> None:
        wrong = next((i for i in ids if not 0 <= i < self._vocabulary), None)
        if wrong is not None:
            message = f"token id {wrong} is outside the vocabulary of {self._vocabulary}"
            raise Refused(400, "invalid_token_id", message, param="prompt")

    def _too_long(self, prompt: int, answer: int, param: str) -> Refused:
        message = (
            f"the prompt's {prompt} tokens and {answer} of the answer are more than "
            f"the {self._context} that this model can hold"
        )
        return Refused(400, "context_length_exceeded", message, param=param)


def _key(request: GenerateRequest) -> object:
    return request.prompt, request.messages
