"""What may go wrong between a request and its tokens, by kind.

Law: exceptions only. Each says in `code` (machine-readable, stable) what happened; how it looks on the wire
is decided in services/generation.py alone.
"""

from __future__ import annotations


class EngineFault(RuntimeError):
    """The engine failed at this request; another instance may do better (503, unless said otherwise)."""

    code = "engine_error"


class EngineDied(EngineFault):
    """The engine is broken for good: the instance must go out of traffic."""

    code = "engine_dead"


class EngineHung(EngineFault):
    """No token came within the limit."""

    code = "engine_hung"


class OutOfDeviceMemory(EngineFault):
    """The device ran out of memory in a step; the engine goes on, the sequences of that step are lost."""

    code = "out_of_memory"


class BadLogits(EngineFault):
    """The model gave NaN or infinite logits for this sequence; nothing sensible can be sampled."""

    code = "bad_logits"


class DeviceLost(EngineDied):
    """The device is gone or answers nothing."""

    code = "device_lost"


class WakeFailed(EngineFault):
    """Waking did not work: no memory, or the fixed prompt got another answer than before sleeping."""

    code = "wake_failed"


class DeadlinePassed(EngineFault):
    """The request's own deadline passed, in the queue or while it ran (408)."""

    code = "deadline_passed"


class Refused(EngineFault):
    """The request is not taken, before any work was done.

    status: 400 (it can never be served: `param` names the field), 429 (not now: queue or KV full;
    retry_after_s says when), 503 (no longer: asleep, closed). code: machine-readable reason, e.g.
    "context_length_exceeded", "queue_full", "kv_full".
    """

    def __init__(
        self, status: int, code: str, message: str, *, param: str | None = None, retry_after_s: float = 0.0
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.retry_after_s = status, code, param, retry_after_s
