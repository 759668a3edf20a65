"""The batch scheduler: who is served when, on one engine.

Law: the core (model, order, admission, core, cliff, sampler, counts) is pure, in the caller's time;
`Scheduled` is the shell around one engine and is an Engine itself.
"""

from services.batching.cliff import CliffSettings
from services.batching.model import BatchingCounts, BatchingSettings
from services.batching.scheduled import Scheduled

__all__ = ["BatchingCounts", "BatchingSettings", "CliffSettings", "Scheduled"]
