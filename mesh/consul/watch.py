"""A blocking query that never ends: ask, wait, tell when the content changed, ask again.

Law: a Watch ends only by cancellation. Whatever goes wrong (403 before a token is replicated, 429, 5xx, a
cut connection, no answer, an answer that can't be decoded) is shown in `error`, waited out with
jitter and asked again. Time and chance come in from outside. The rules are pure functions below the class.

Why each rule exists: an index may go backwards (snapshot restore, a list deleted, another server), and
then a client that keeps the old one sleeps for ever; index 0 doesn't block, so a server that answers
0 would make a busy loop; an index may move without a change, so content is compared, not indexes;
and a server that answers at once, always, must not make us spin (the pace).
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, NoReturn, TypeVar

from mesh.clock import Clock

T = TypeVar("T")
log = logging.getLogger(__name__)

LOCAL_WAIT_S = 55.0
"""For the own datacenter: one idle request a minute. The agent counts a connection that we closed against its
limit (200 per client) until the wait is over, so longer is not better."""
REMOTE_WAIT_S = 2.0
"""For another datacenter: a dead one may swallow a blocking query without a word, so that wait and slack
(with REMOTE) are how long a watch can hang on to a corpse. Under 5 s together with the longest back-off."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """How a watch behaves around its waits. Seconds.

    slack_s: how much longer than the longest legal wait an answer may take.
    backoff_first_s, backoff_most_s: pauses after errors double from the one to the other.
    per_s, burst: floor under the loop: at most `burst` answers at once, then `per_s` a second.
    idle_cost: an answer without news counts as so many.
    """

    slack_s: float = 5.0
    backoff_first_s: float = 0.05
    backoff_most_s: float = 1.0
    per_s: float = 100.0
    burst: int = 20
    idle_cost: int = 5


LOCAL = Tuning()
REMOTE = Tuning(slack_s=1.5)


class Watch(Generic[T]):
    """Calls `on_value(value, index)` in the loop's thread for the first answer and after each change.

    fetch(index, wait_s): one blocking read; index 0 must answer at once. The value needs a true `==`.
    If on_value raises, the value counts as not taken: it is shown in `error` and offered again later.
    """

    def __init__(
        self,
        name: str,
        fetch: Callable[[int, float], Awaitable[tuple[int, T]]],
        on_value: Callable[[T, int], None],
        *,
        clock: Clock,
        rng: random.Random,
        wait_s: float = LOCAL_WAIT_S,
        tuning: Tuning = LOCAL,
    ) -> None:
        self.name = name
        self.error: str | None = None
        self.index = 0
        self.wakeups = 0
        self.changes = 0
        self._fetch, self._on_value = fetch, on_value
        self._clock, self._rng = clock, rng
        self._wait_s, self._tuning = wait_s, tuning
        self._last: tuple[T] | None = None
        self._answered_at: float | None = None
        self._failures = 0
        self._allowance = float(tuning.burst)
        self._paced_at = clock.monotonic()

    def age_s(self, now: float) -> float | None:
        """Seconds (clock.monotonic) since Consul last answered; None before the first answer.

        An idle watch is silent for its wait, so only an age over `stale_after_s` means trouble.
        """
        return None if self._answered_at is None else now - self._answered_at

    @property
    def failures(self) -> int:
        """Failures in a row since the last answer."""
        return self._failures

    @property
    def stale_after_s(self) -> float:
        return answer_deadline_s(1, self._wait_s, self._tuning.slack_s)

    async def run(self) -> NoReturn:
        """Never returns; cancel it."""
        while True:
            await self._keep_pace()
            asked_at = self._clock.monotonic()
            deadline_s = answer_deadline_s(self.index, self._wait_s, self._tuning.slack_s)
            try:
                async with asyncio.timeout(deadline_s):
                    answered, value = await self._fetch(self.index, self._wait_s)
                self._take(answered, value, self._clock.monotonic() - asked_at)
            except TimeoutError:
                await self._fail(f"no answer within {deadline_s:g} s")
            except Exception as error:
                await self._fail(f"{type(error).__name__}: {error}".splitlines()[0])

    def _take(self, answered: int, value: T, took_s: float) -> None:
        self.wakeups += 1
        if self._last is None or self._last[0] != value:
            self._on_value(value, answered)
            self._last = (value,)
            self.changes += 1
        else:
            self._allowance -= self._tuning.idle_cost - 1
        self._answered_at = self._clock.monotonic()
        self.index = next_index(self.index, answered, early=took_s < self._wait_s * 0.95)
        if self.error is not None:
            log.info("watch %s: answered again after %d failures", self.name, self._failures)
        self.error, self._failures = None, 0

    async def _fail(self, told: str) -> None:
        self._failures += 1
        # Once per outage: during one the wording changes with every try.
        log.log(logging.WARNING if self._failures == 1 else logging.DEBUG, "watch %s: %s", self.name, told)
        self.error = told
        # The other end may have lost its memory (new data folder, other server): ask without an index,
        # which answers at once. If nothing changed nobody is told.
        self.index = 0
        await self._clock.sleep(backoff_s(self._tuning, self._failures, self._rng.random()))

    async def _keep_pace(self) -> None:
        now = self._clock.monotonic()
        earned = (now - self._paced_at) * self._tuning.per_s
        self._allowance = min(float(self._tuning.burst), self._allowance + earned)
        self._paced_at = now
        if self._allowance < 1:
            await self._clock.sleep((1 - self._allowance) / self._tuning.per_s)
            self._allowance, self._paced_at = 1.0, self._clock.monotonic()
        self._allowance -= 1


def next_index(asked: int, answered: int, early: bool) -> int:
    """The index to ask with after an answer: 0 (start over) if it can't be trusted, else at least 1.

    early: the answer came before the wait was over. With the very index that was asked with, that is how
    a snapshot restore looks (measured on 1.8.7): the query is woken with the OLD content and index, and
    the next one would sleep in the restored store, whose index is lower, until the wait is over.
    """
    if answered < asked or (early and answered == asked > 0):
        return 0
    return max(1, answered)


def backoff_s(tuning: Tuning, failures: int, chance: float) -> float:
    """Seconds to pause after so many failures in a row (>= 1); chance in [0, 1) takes off up to a half."""
    full = min(tuning.backoff_most_s, tuning.backoff_first_s * 2.0 ** min(failures - 1, 30))
    return full * (0.5 + chance / 2)


def answer_deadline_s(index: int, wait_s: float, slack_s: float) -> float:
    """Seconds after which an answer won't come any more. Consul adds up to wait/16; index 0 doesn't wait."""
    return slack_s if index == 0 else wait_s + wait_s / 16 + slack_s
