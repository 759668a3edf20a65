"""The asyncio side of a torch engine: one stream of tokens per request, fed by the worker's thread.

Law: everything here runs in the event loop but `_deliver`, which only hands over, once per step. Text is made
here, while the worker's next step computes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from collections.abc import Sequence as Seq

from services.engine import FinishReason, GenerateRequest, Token
from services.faults import EngineDied
from services.llama.core import Outcome
from services.llama.sequence import Sequence
from services.llama.tokenizer import Detokenizer, Tokenizer
from services.llama.worker import Worker


class Stream:
    """Tokens of one sequence that were made and not yet asked for."""

    def __init__(self, detokenizer: Detokenizer, stops: Seq[str], engine: str, prompt: int) -> None:
        self._detokenizer, self._stops, self._engine, self._prompt = detokenizer, stops, engine, prompt
        self._ready: deque[Token | Exception] = deque()
        self._event = asyncio.Event()
        self._tail, self._keep = "", max(map(len, stops), default=0)
        self.ended = False

    def feed(self, outcome: Outcome) -> None:
        """`ended` afterwards: nothing more will come or is wanted."""
        if self.ended:
            return
        self._ready.append(outcome.error or self._token(outcome))
        self.ended = self.ended or outcome.error is not None
        self._event.set()

    def fail(self, error: Exception) -> None:
        if not self.ended:
            self.ended = True
            self._ready.append(error)
            self._event.set()

    async def get(self) -> Token:
        """The next one. Raises what ended the sequence."""
        while not self._ready:
            self._event.clear()
            await self._event.wait()
        item = self._ready.popleft()
        if isinstance(item, Exception):
            raise item
        return item

    def _token(self, outcome: Outcome) -> Token:
        # An end token ends the answer and isn't part of its text.
        text = "" if outcome.finish == "stop" else self._detokenizer.feed(outcome.token)
        finish = FinishReason(outcome.finish) if outcome.finish else None
        if text and self._keep:
            # A stop string may begin in an earlier token, never further back than its own length.
            self._tail = self._tail[-self._keep :] + text
            if any(stop in self._tail for stop in self._stops):
                finish = FinishReason.STOP
        self.ended = finish is not None
        prompt, self._prompt = self._prompt, 0
        return Token(outcome.token, text, finish, prompt, self._engine)


class Serving:
    """Streams over one worker. name: of the engine, on every token."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop = asyncio.get_running_loop()
        self._streams: dict[Sequence, Stream] = {}
        self.worker = Worker(f"weir-{name}", self._deliver)
        self.tokens = self.prompt_tokens = 0

    @property
    def open(self) -> int:
        """Requests that somebody still listens to."""
        return len(self._streams)

    @property
    def dead(self) -> str:
        return self.worker.dead

    async def tokens_of(
        self, request: GenerateRequest, sequence: Sequence, tokenizer: Tokenizer
    ) -> AsyncGenerator[Token, None]:
        """Run it to its end. Closing frees its slot and blocks before the next step."""
        if self.dead:
            raise EngineDied(self.dead)
        stream = Stream(Detokenizer(tokenizer), request.stop, self._name, sequence.prompt)
        self._streams[sequence] = stream
        self.prompt_tokens += sequence.prompt
        self.worker.submit(sequence)
        finish: FinishReason | None = None
        try:
            while finish is None:
                token = await stream.get()
                finish = token.finish
                yield token
        finally:
            self._streams.pop(sequence, None)
            if not sequence.cancelled:
                self.worker.cancel(sequence)

    async def close(self, timeout_s: float) -> bool:
        """Whether the worker's thread ended; streams that are open end with EngineDied."""
        for stream in tuple(self._streams.values()):
            stream.fail(EngineDied("the engine was closed"))
        return await asyncio.to_thread(self.worker.close, timeout_s)

    def _deliver(self, outcomes: Seq[Outcome]) -> None:
        try:
            self._loop.call_soon_threadsafe(self._feed, outcomes)
        except RuntimeError:
            if not self._loop.is_closed():
                raise
            # The loop is gone and with it everybody who listened: don't compute for nobody.
            for outcome in outcomes:
                outcome.sequence.cancelled = True

    def _feed(self, outcomes: Seq[Outcome]) -> None:
        for outcome in outcomes:
            stream = self._streams.get(outcome.sequence)
            if stream is None:
                continue
            stream.feed(outcome)
            if outcome.error is None:
                self.tokens += 1
            if stream.ended and not outcome.finish and not outcome.error:
                # A stop string: the core doesn't know of it yet.
                self.worker.cancel(outcome.sequence)
