"""One sequence while it is made: tokens from the engine become pieces of text that may be sent.

Law: no HTTP. Closing `pieces` closes the engine's iterator, which frees slot and KV. Whatever goes wrong in
an engine leaves here as an ApiError and stands in the log; this file alone decides how a fault looks on the
wire.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator

from services.engine import FinishReason, GenerateRequest, Token
from services.faults import DeadlinePassed, EngineFault, Refused
from services.instance import Instance
from services.openai_fields import OVER, ApiError
from services.stops import Cutter
from services.telemetry.tally import Watch

log = logging.getLogger("weir.executor")

SOON_S = 1.0
"""When to come again to an address whose instance ends: behind it are others, or the next one of its name."""

Piece = tuple[int, str, str | None, int]
"""Index of the choice; text, empty where a stop string may be coming; why it ended, or None; token id."""


class Generation:
    """tokens, prompt_tokens, finish, engine: what is known so far; final when `pieces` has ended. fallback:
    why another engine than the usual one gives this answer, or empty; known with the first token."""

    def __init__(self, instance: Instance, job: GenerateRequest, index: int, watch: Watch) -> None:
        self._it, self._job, self._index, self._watch = instance, job, index, watch
        self.tokens = self.prompt_tokens = 0
        self.finish = self.engine = self.fallback = ""

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """One per token, at least one. Raises ApiError: 503 when another instance may do better, else what
        the fault says."""
        cut, watch, index = Cutter(self._job.stop), self._watch, self._index
        made: AsyncGenerator[Token, None] | None = None
        try:
            # An engine that is closed refuses here already, before there is anything to iterate over.
            made = self._it.engine.generate(self._job)
            async for token in made:
                if self.tokens:
                    watch.token()
                else:
                    self.engine, self.prompt_tokens = token.engine, token.prompt_tokens
                    self.fallback = self._it.why_fallback(self._job.request_id)
                    watch.first(token.engine, token.prompt_tokens)
                self.tokens += 1
                text = cut.feed(token.text)
                if cut.stopped:
                    self.finish = FinishReason.STOP.value
                elif token.finish is not None:
                    text += cut.rest()
                    self.finish = token.finish.value
                    # Some upstream servers count a prompt only in the end.
                    self.prompt_tokens = self.prompt_tokens or token.prompt_tokens
                yield index, text, self.finish or None, token.token_id
                if self.finish:
                    break
            else:
                raise EngineFault("the engine ended without saying why")
        except Exception as error:
            raise self._refusal(error) from error
        finally:
            if made is not None:
                await made.aclose()
            watch.ended(self.finish, self._it.engine.facts().name)

    def _refusal(self, error: Exception) -> ApiError:
        name = self._job.request_id
        if isinstance(error, ApiError):
            return error
        if not isinstance(error, RuntimeError):
            log.exception("%s: the engine raised what it should not", name)
            return ApiError(500, f"the engine failed: {type(error).__name__}", None, "engine_error")
        if not isinstance(error, Refused):
            log.warning("%s: %s: %s", name, type(error).__name__, error)
        # Not every EngineDied is the end of this instance: a fallback may have a second engine.
        if dead := self._it.engine.stats().dead:
            self._it.failed(dead)
        return on_the_wire(error)


def on_the_wire(error: RuntimeError) -> ApiError:
    """How a fault of an engine looks to a client. RuntimeErrors that are no EngineFault: asleep, not
    started."""
    code = error.code if isinstance(error, EngineFault) else "engine_error"
    if isinstance(error, Refused):
        return ApiError(error.status, str(error), error.param, code, error.retry_after_s)
    if isinstance(error, DeadlinePassed):
        return too_late(str(error) or "the deadline passed")
    return ApiError(503, f"the engine failed: {error}", None, code)


def too_late(message: str, *, own: bool = True) -> ApiError:
    """A limit of time passed before the answer was there. own: the request's own deadline, else the mesh's
    limit for this one try.

    A request whose time is over must not be computed again. Envoy retries 504 elsewhere (`gateway-error`)
    and takes three in a row for a broken instance; 408 it passes on, as any word on the request itself. A
    try that took too long is another matter: it may go better elsewhere, and Envoy's own timer, which runs
    at the same time, says 504 too.
    """
    if own:
        return ApiError(OVER, message, None, DeadlinePassed.code)
    return ApiError(504, "this try took longer than the mesh allows for one", None, "try_timeout")


def shutting_down() -> ApiError:
    """This instance ends; others go on, and may be asked at once."""
    return ApiError(503, "this instance is shutting down", None, "shutting_down", SOON_S)
