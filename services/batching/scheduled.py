"""An engine behind a scheduler: the shell that gives the core its time and the requests their turn.

Law: decides nothing; it asks the core (who, when), waits, and passes the inner engine's tokens on. Whatever
way a request ends, its place and KV go back once the inner engine let go of it, not when its reader has read
the last token.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
from collections import Counter
from collections.abc import AsyncGenerator
from functools import partial
from random import Random

from mesh.clock import Clock, SystemClock
from services.batching.admission import backoff_s, fitting, limits, need
from services.batching.core import Core
from services.batching.counts import extra, gather
from services.batching.job import Job
from services.batching.model import GONE, PLACED, BatchingCounts, BatchingSettings, Late
from services.batching.sampler import Governor
from services.engine import Engine, EngineFacts, EngineStats, GenerateRequest, Token
from services.faults import DeadlinePassed, EngineDied, EngineFault, EngineHung, Refused

log = logging.getLogger("weir.batching")

NOT_RETRIED = (Refused, EngineDied, DeadlinePassed, EngineHung)
"""Another try would be refused again, die again, or come later than anybody waits: a hang took its time."""
STUCK = 3
"""So many hangs with no token for anybody between them are no fault of the sequences: the engine is stuck,
and who comes next would wait as long for nothing."""


class Scheduled:
    """An Engine. rng: for the jitter of retries."""

    def __init__(
        self,
        engine: Engine,
        settings: BatchingSettings | None = None,
        clock: Clock | None = None,
        rng: Random | None = None,
    ) -> None:
        self.engine, self._how = engine, settings or BatchingSettings()
        self._clock, self._rng = clock or SystemClock(), rng or Random(0)  # noqa: S311 (jitter, no secret)
        self._ranks = {name: rank for rank, name in enumerate(self._how.classes)}
        self._core: Core[Job] = Core(self._how, limits(EngineFacts(""), self._how))
        self._governor = Governor(self._how, self._core)
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf
        self._started, self._known, self._asleep, self._dead = False, False, False, ""
        self._hangs, self._stuck = 0, ""
        self._serving: set[asyncio.Task[None]] = set()
        self._refusals: Counter[str] = Counter()

    async def start(self) -> None:
        """Its counters start anew: the limits may be others."""
        await self.engine.start()
        self._core = Core(self._how, limits(self.engine.facts(), self._how))
        self._governor = Governor(self._how, self._core)
        self._started, self._known, self._asleep, self._dead = True, True, False, ""
        self._hangs, self._stuck = 0, ""

    def facts(self) -> EngineFacts:
        """The inner engine's; sequences: those that get a place, where the settings allow fewer."""
        facts = self.engine.facts()
        if not self._known or facts.sequences == self._core.limits.places:
            return facts
        return dataclasses.replace(facts, sequences=self._core.limits.places)

    def size(self, request: GenerateRequest) -> int:
        return self.engine.size(request)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Token, None]:
        """Tokens of one sequence, once it has a place. Raises Refused before anything is queued, then
        DeadlinePassed, EngineHung, and what the inner engine raises.
        """
        core = self._core
        job = self._submitted(core, request)
        job.serving = asyncio.create_task(self._serve(core, job, request), name="sequence")
        self._serving.add(job.serving)
        job.serving.add_done_callback(partial(self._served, core, job))
        try:
            while True:
                token = await job.take()
                yield token
                if token.finish is not None:
                    return
        finally:
            await job.over()
            self._leave(core, job)

    async def sleep(self, level: int = 1) -> None:
        """Raises RuntimeError while anything runs or waits."""
        core = self._core
        if core.running or core.queued or core.delayed:
            raise RuntimeError("can't sleep: requests are running or waiting")
        self._asleep = True
        try:
            await self.engine.sleep(level)
        except BaseException:
            self._asleep = False
            raise

    async def wake(self) -> None:
        await self.engine.wake()
        self._asleep = False

    def stats(self) -> EngineStats:
        """The inner engine's, with those waiting here, and `batching_…` in extra. running: those that have a
        place, also where the engine is done and the reader is not. dead: stuck is dead too.
        """
        inner, core = self.engine.stats(), self._core
        return dataclasses.replace(
            inner,
            running=max(inner.running, core.running - inner.waiting),
            waiting=inner.waiting + core.queued + core.delayed,
            dead=inner.dead or self._stuck,
            capacity=inner.capacity * self._governor.capacity,
            extra={**inner.extra, **extra(self.counts())},
        )

    async def close(self) -> None:
        """Whoever waits gets EngineDied. Fine to call twice."""
        self._started = False
        self._fail_waiting(self._core, EngineDied("the engine was closed"))
        await self.engine.close()
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_at = None, math.inf

    def counts(self) -> BatchingCounts:
        return gather(self._core, self._governor, self._how, self._refusals)

    def _submitted(self, core: Core[Job], request: GenerateRequest) -> Job:
        try:
            self._check()
            size = self.engine.size(request)
            if self.engine.facts().estimates and not request.prompt_ids:
                size = fitting(size, request.max_tokens, core.limits)
            blocks = need(size, request.max_tokens, core.limits, open_ended=request.open_ended)
            now = self._clock.monotonic()
            job = Job(blocks, self._ranks.get(request.tenant_class, len(self._ranks)), now)
            if request.deadline_s is not None:
                job.deadline = now + request.deadline_s
                if request.deadline_s <= 0:
                    core.deadline_misses += 1
                    raise DeadlinePassed("the deadline had passed before the request came")
            core.submit(job, now)
        except Refused as refused:
            self._refusals[refused.code] += 1
            raise
        self._pump(core, now)
        if job.phase is not PLACED:
            job.turn = asyncio.get_running_loop().create_future()
        return job

    def _check(self) -> None:
        if self._dead:
            self._dead = self.engine.stats().dead  # it may have been brought back
        if self._dead or self._stuck:
            raise EngineDied(self._dead or self._stuck)
        if not self._started:
            raise RuntimeError("the engine was not started")
        if self._asleep:
            raise Refused(503, "asleep", "this instance sleeps")

    async def _serve(self, core: Core[Job], job: Job, request: GenerateRequest) -> None:
        """Drive the inner engine to the end, in a task of the job's own."""
        try:
            while not await self._tried(core, job, request):
                self._try_again(core, job)
            return
        except EngineDied as died:
            self._dead = str(died) or died.code
            self._fail_waiting(core, died)
            fault: Exception = died
        except Exception as error:
            fault = error  # the reader's to hear, whatever it is
        self._leave(core, job)
        job.put(fault)

    async def _tried(self, core: Core[Job], job: Job, request: GenerateRequest) -> bool:
        """Whether that was the last try: all is said. Raises the fault where no other try is allowed."""
        how = self._how
        if job.turn is not None:
            await job.turn
        try:
            job.inner = self.engine.generate(request)
            while True:
                limit_s = how.idle_s if job.sent else how.first_token_s
                token = await job.next_token(self._clock.monotonic(), limit_s)
                self._governor.tokens += 1
                self._hangs = 0
                if token.finish is not None:
                    # Its place is the next one's now, not when the reader has read the last token.
                    await job.let_go()
                    self._leave(core, job)
                    job.put(token)
                    return True
                job.sent = True
                job.put(token)
                if len(job.outbox) >= how.read_ahead:
                    await job.space(how.read_ahead)
        except EngineFault as fault:
            job.tries += 1
            if job.sent or job.tries > how.retries or core.full or isinstance(fault, NOT_RETRIED):
                raise
            return False
        finally:
            await job.let_go()

    def _served(self, core: Core[Job], job: Job, task: asyncio.Task[None]) -> None:
        """Its task has ended, by itself or cancelled, perhaps before it began."""
        self._serving.discard(task)
        self._leave(core, job)
        if task.cancelled() and not job.stopped:
            job.put(EngineFault("the engine broke the sequence off"))

    def _try_again(self, core: Core[Job], job: Job) -> None:
        now = self._clock.monotonic()
        job.turn = asyncio.get_running_loop().create_future()
        core.again(job, now + backoff_s(self._how, job.tries, self._rng.random()))
        self._pump(core, now)

    def _leave(self, core: Core[Job], job: Job) -> None:
        if job.phase is not GONE:
            now = self._clock.monotonic()
            core.finish(job, now)
            self._pump(core, now)

    def _pump(self, core: Core[Job], now: float) -> None:
        """Let those in whose turn it is, and see to it that the next event is not missed."""
        for job in core.start(now):
            job.called()
        if core.running:
            self._governor.wake(now)
        at = min(core.next_at(), self._governor.at)
        if at < self._timer_at:
            if self._timer is not None:
                self._timer.cancel()
            # Timers of the loop are monotonic like the Clock, and dearer tools (a task that sleeps) are late.
            self._timer = asyncio.get_running_loop().call_later(max(0.0, at - now), self._tick, core)
            self._timer_at = at

    def _tick(self, core: Core[Job]) -> None:
        self._timer, self._timer_at = None, math.inf
        now = self._clock.monotonic()
        for job, late in core.due(now):
            job.end(self._fault(job, late))
            self._hangs += late is Late.SILENT
        if self._hangs >= STUCK and not self._stuck:
            self._stuck = f"the engine is stuck: {self._hangs} sequences hung with no token for anybody"
            log.error("%s", self._stuck)
            self._fail_waiting(core, EngineDied(self._stuck))
        before = (core.batch, self._governor.capacity, self._governor.state.cliffs)
        self._governor.look(now)
        self._tell(core, *before)
        self._pump(core, now)

    def _tell(self, core: Core[Job], batch: int, capacity: float, cliffs: int) -> None:
        """What the governor has changed, in the log."""
        if core.batch != batch:
            log.warning("throughput: batches of %d instead of %d from now on", core.batch, batch)
        elif self._governor.state.cliffs != cliffs:
            left = self._governor.capacity
            log.warning("throughput: a cliff, and no smaller batch to go to; capacity %.2f", left)
        elif capacity < 1.0 == self._governor.capacity:
            log.warning("throughput: what there is is usual again")

    def _fault(self, job: Job, late: Late) -> EngineFault:
        if late is Late.DEADLINE:
            where = "while it ran" if job.inner is not None else "in the queue"
            return DeadlinePassed(f"the deadline passed {where}")
        limit = self._how.idle_s if job.sent else self._how.first_token_s
        return EngineHung(f"no {'further' if job.sent else 'first'} token within {limit:g} s")

    def _fail_waiting(self, core: Core[Job], fault: EngineDied) -> None:
        for job in core.abandon(self._clock.monotonic()):
            job.end(type(fault)(str(fault)))
