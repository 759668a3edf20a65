"""One answer while it is made: tokens from the engine become pieces of text that may be sent.

Law: no HTTP. Closing `pieces` closes the engine's iterator, which frees the slot. Whatever goes wrong in an
engine leaves here as an ApiError and stands in the log.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator

from services.engine import FinishReason, GenerateRequest
from services.instance import Instance
from services.openai_api import ApiError, Ask
from services.stops import Cutter

log = logging.getLogger("weir.executor")


class Generation:
    """tokens, prompt_tokens, finish: what is known so far; final when `pieces` has ended."""

    def __init__(self, instance: Instance, ask: Ask, identity: str) -> None:
        self._it, self._cutter = instance, Cutter(ask.stop)
        self._job = GenerateRequest(
            request_id=identity,
            prompt=ask.prompt,
            max_tokens=ask.max_tokens,
            seed=ask.seed,
            stop=ask.stop,
            temperature=ask.temperature,
            tenant_class=instance.identity.tenant_class,
        )
        self.tokens = self.prompt_tokens = 0
        self.finish = ""

    async def pieces(self) -> AsyncGenerator[tuple[str, str | None], None]:
        """(text, why it ended or None), at least once. The text is empty where a stop string may be coming.

        Raises ApiError: 503 when another instance may do better (dead, asleep, overloaded), else 500.
        """
        try:
            async with contextlib.aclosing(self._texts()) as texts:
                async for text in texts:
                    yield text, self.finish or None
        except ApiError:
            raise
        except RuntimeError as error:
            raise self._broken(error) from error
        except Exception as error:
            log.exception("the engine raised what it should not: %s", self._job.request_id)
            raise ApiError(500, f"the engine failed: {type(error).__name__}", code="engine_error") from error

    async def _texts(self) -> AsyncGenerator[str, None]:
        cut = self._cutter
        async with contextlib.aclosing(self._it.engine.generate(self._job)) as made:
            async for token in made:
                self.tokens += 1
                self._it.tokens.inc()
                self.prompt_tokens = self.prompt_tokens or token.prompt_tokens
                text = cut.feed(token.text)
                if cut.stopped:
                    self.finish = FinishReason.STOP.value
                elif token.finish:
                    text += cut.rest()
                    self.finish = token.finish.value
                yield text
                if self.finish:
                    return
        raise RuntimeError("the engine ended without saying why")

    def _broken(self, error: RuntimeError) -> ApiError:
        if self._it.engine.stats().dead:
            self._it.failed(str(error))
        log.warning("%s: %s", self._job.request_id, error)
        return ApiError(503, f"the engine failed: {error}", code="engine_error")
