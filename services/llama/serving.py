"""The asyncio side of a torch engine: one stream of tokens per request, fed by the worker's thread.

Law: everything here runs in the event loop but what the worker calls (`deliver`, `died`, `over`), which only
hands over, once per step. Text is made here, while the worker's next step computes; where that fails it costs
the one answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable
from collections.abc import Sequence as Seq

from services.engine import FinishReason, GenerateRequest, Token
from services.faults import EngineDied, EngineFault
from services.llama.core import Outcome
from services.llama.sequence import Sequence
from services.llama.tokenizer import Detokenizer, Tokenizer
from services.llama.worker import Worker

log = logging.getLogger("weir.torch")


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
    """Streams over one worker, whose owner it is. name: of the engine, on every token. over: the last thing
    that runs in the worker's thread."""

    def __init__(self, name: str, over: Callable[[], None]) -> None:
        self._name, self.over = name, over
        self._loop = asyncio.get_running_loop()
        self._streams: dict[Sequence, Stream] = {}
        self.worker = Worker(f"weir-{name}", self)
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
        self._fail(EngineDied("the engine was closed"))
        # At once: whoever gives up waiting must not take the end back.
        self.worker.end()
        return await asyncio.to_thread(self.worker.ended, timeout_s)

    def deliver(self, outcomes: Seq[Outcome]) -> None:
        if not self._in_loop(self._feed, outcomes):
            # Don't compute for nobody.
            for outcome in outcomes:
                outcome.sequence.cancelled = True

    def died(self, error: EngineDied) -> None:
        self._in_loop(self._fail, error)

    def _in_loop(self, what: Callable[..., None], *given: object) -> bool:
        """False when the loop is gone, and with it everybody who listened."""
        try:
            self._loop.call_soon_threadsafe(what, *given)
        except RuntimeError:
            if not self._loop.is_closed():
                raise
            return False
        return True

    def _fail(self, error: EngineDied) -> None:
        for stream in tuple(self._streams.values()):
            stream.fail(error)

    def _feed(self, outcomes: Seq[Outcome]) -> None:
        for outcome in outcomes:
            stream = self._streams.get(outcome.sequence)
            if stream is None:
                continue
            try:
                stream.feed(outcome)
            except Exception as error:  # of the tokenizer; what comes next belongs to others
                log.exception("no text for token %d", outcome.token)
                stream.fail(EngineFault(f"no text for token {outcome.token}: {error}"))
            if outcome.error is None:
                self.tokens += 1
            if stream.ended and not outcome.finish and not outcome.error:
                # A stop string, or no text: the core doesn't know of it yet.
                self.worker.cancel(outcome.sequence)
