"""The sim engine: a continuous-batching engine whose only hardware is a price list.

Law: one loop steps all running sequences, each step gives each of them one token; time passes through the
Clock alone; what is said and what it costs comes from services/sim_cost.py. For tests, drills and benches.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Mapping, Sequence

from mesh.clock import Clock, SystemClock
from services.engine import EngineFacts, EngineStats, FinishReason, GenerateRequest, Token
from services.faults import (
    BadLogits,
    DeviceLost,
    EngineDied,
    EngineFault,
    OutOfDeviceMemory,
    Refused,
    WakeFailed,
)
from services.sim_cost import SimOptions, Words, blocks, fails, parse, prompt_tokens, step_s

HAND_OVER_TURNS = 3
"""Turns of the event loop between two steps. Without them the next step begins before the reader of a last
token has told anybody that a place is free, and each sequence costs the engine an empty place for a step."""


def make(model: str, options: Mapping[str, str]) -> SimEngine:
    """It has no model: any name will do. Raises UsageError for an option that it doesn't know."""
    return SimEngine(parse(options), model)


class _Sequence:
    """One sequence: its blocks, what it has said, and what its reader has not taken yet."""

    __slots__ = ("ask", "hung", "made", "need", "outbox", "reader", "size", "tail", "words")

    def __init__(self, ask: GenerateRequest, size: int, need: int, salt: int) -> None:
        self.ask, self.size, self.need = ask, size, need
        self.words, self.made, self.hung, self.tail = Words(ask, salt), 0, False, ""
        self.outbox: deque[Token | EngineFault] = deque()
        self.reader: asyncio.Future[None] | None = None

    def put(self, what: Token | EngineFault) -> None:
        self.outbox.append(what)
        if self.reader is not None and not self.reader.done():
            self.reader.set_result(None)

    async def take(self) -> Token:
        while not self.outbox:
            self.reader = asyncio.get_running_loop().create_future()
            await self.reader
        what = self.outbox.popleft()
        if isinstance(what, EngineFault):
            raise what
        return what

    def next_token(self, eos_mean: int) -> Token:
        ask, index = self.ask, self.made
        number, piece = self.words.at(index)
        self.made = index + 1
        finish = FinishReason.LENGTH if self.made >= ask.max_tokens else None
        if ask.stop:
            # A stop string may begin in an earlier token, never further back than its own length.
            self.tail = self.tail[-max(map(len, ask.stop)) :] + piece
            finish = FinishReason.STOP if any(s in self.tail for s in ask.stop) else finish
        if eos_mean and not ask.ignore_eos and self.words.ends(index, eos_mean):
            finish = FinishReason.STOP
        return Token(number, piece, finish, self.size, "sim")


class SimEngine:
    """An Engine. Cancelling is closing the iterator; slot and blocks are free at once."""

    def __init__(self, options: SimOptions, model: str = "", clock: Clock | None = None) -> None:
        self._options, self._model, self._clock = options, model, clock or SystemClock()
        self._blocks = options.kv_tokens // options.kv_block
        self._running: dict[_Sequence, None] = {}
        self._waiting: OrderedDict[_Sequence, None] = OrderedDict()
        self._loop: asyncio.Task[None] | None = None
        self._started = self._asleep = self._garbage = False
        self._dead = ""
        self._born, self._due = 0.0, -math.inf
        self._requests = self._steps = self._tokens = self._prompt_tokens = 0
        self._kv = self._wakes = self._leaked = 0

    async def start(self) -> None:
        if self._started:
            raise RuntimeError("the engine runs already")
        self._started, self._asleep, self._garbage, self._dead = True, False, False, ""
        await self._pass(self._options.start_ms)
        self._born = self._clock.monotonic()

    def facts(self) -> EngineFacts:
        o = self._options
        return EngineFacts(
            "sim",
            self._model,
            context=o.context,
            sequences=o.slots,
            kv_tokens=self._blocks * o.kv_block,
            kv_block=o.kv_block,
            continuous=bool(o.continuous),
            sleep_levels=(1, 2),
            weights_bytes=o.weights_bytes,
        )

    def size(self, request: GenerateRequest) -> int:
        return prompt_tokens(request)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Token, None]:
        """Tokens of one sequence. Raises Refused for what can never fit, the faults on order, RuntimeError
        while asleep.
        """
        sequence = self._admit(request)
        self._waiting[sequence] = None
        self._kick()
        try:
            while True:
                token = await sequence.take()
                yield token
                if token.finish is not None:
                    return
        finally:
            self._remove(sequence)
            self._kick()

    async def sleep(self, level: int = 1) -> None:
        if self._running or self._waiting:
            raise RuntimeError("can't sleep: sequences are running")
        if not self._asleep:
            self._asleep = True
            self._leaked += self._options.leak_bytes
            await self._pass(self._options.sleep_ms)

    async def wake(self) -> None:
        if not self._asleep:
            return
        await self._pass(self._options.wake_ms)
        self._wakes += 1
        if self._wakes <= self._options.wake_fails:
            raise WakeFailed(f"wake {self._wakes} fails on order")
        self._garbage = self._wakes <= self._options.wake_fails + self._options.wake_garbage
        self._asleep = False

    def stats(self) -> EngineStats:
        return EngineStats(
            len(self._running),
            len(self._waiting),
            self._kv / self._blocks if self._blocks else 0.0,
            self._tokens,
            {"steps": float(self._steps)},
            prompt_tokens=self._prompt_tokens,
            dead=self._dead,
            memory_bytes=self._held() + self._leaked,
        )

    async def close(self) -> None:
        """Whoever still reads gets EngineDied; it may be started again. Fine to call twice."""
        why = self._dead
        self._break(EngineDied("the engine was closed"))
        self._dead = why
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.gather(self._loop, return_exceptions=True)
        self._leaked, self._started = 0, False

    def _held(self) -> int:
        o = self._options
        awake = self._started and not self._asleep
        return o.weights_bytes + o.kv_tokens * o.kv_bytes_per_token if awake else 0

    def _admit(self, ask: GenerateRequest) -> _Sequence:
        if self._dead:
            raise EngineDied(self._dead)
        if not self._started or self._asleep:
            raise RuntimeError("the engine sleeps" if self._asleep else "the engine was not started")
        size = prompt_tokens(ask)
        whole = size + ask.max_tokens
        need = blocks(whole, self._options.kv_block)
        if whole > self._options.context:
            message = f"{size} prompt tokens and {ask.max_tokens} to make exceed {self._options.context}"
            raise Refused(400, "context_length_exceeded", message, param="max_tokens")
        if need > self._blocks:
            raise Refused(400, "kv_never_fits", f"{need} blocks of KV, the whole cache has {self._blocks}")
        self._requests += 1
        if fails(self._options, self._requests):
            raise EngineFault(f"request {self._requests} fails on order")
        return _Sequence(ask, size, need, int(self._garbage))

    def _remove(self, sequence: _Sequence) -> None:
        if sequence in self._running:
            del self._running[sequence]
            self._kv -= sequence.need
        self._waiting.pop(sequence, None)

    def _kick(self) -> None:
        """The loop lives only while somebody can be served: an idle engine holds no task."""
        if (self._loop is None or self._loop.done()) and (self._running or self._waiting):
            self._loop = asyncio.get_running_loop().create_task(self._run(), name="sim engine")

    async def _run(self) -> None:
        self._due = -math.inf
        try:
            while batch := await self._turn():
                self._step(batch)
        except Exception as error:
            self._break(EngineDied(f"the loop failed: {error}"))  # nobody may wait for a loop that is gone
            raise

    async def _turn(self) -> tuple[_Sequence, ...]:
        """Take in who fits and let the price of one step pass; who was in it, empty: nobody can step."""
        for _ in range(HAND_OVER_TURNS):
            await self._clock.sleep(0)
        prefill = self._join()
        batch = tuple(s for s in self._running if not s.hung)
        if batch:
            now = self._clock.monotonic()
            price = step_s(self._options, len(batch), prefill, now - self._born)
            # A timer that fires late is not the engine's price; a loop that has no time for it is.
            self._due = (self._due if now - self._due < price else now) + price
            await self._clock.sleep(self._due - now)
        return batch

    def _join(self) -> int:
        """Take in who fits, first come first served; prompt tokens that joined."""
        o, joined = self._options, 0
        if not o.continuous and self._running:
            return 0
        while self._waiting:
            sequence = next(iter(self._waiting))
            if len(self._running) >= o.slots or self._kv + sequence.need > self._blocks:
                break
            del self._waiting[sequence]
            self._running[sequence] = None
            self._kv += sequence.need
            joined += sequence.size
        self._prompt_tokens += joined
        return joined

    def _step(self, batch: Sequence[_Sequence]) -> None:
        o, number = self._options, self._steps
        self._steps += 1
        if number == o.lost_at_step:
            self._break(DeviceLost(f"the device was lost in step {number} on order"))
        for sequence in batch:
            if sequence not in self._running:
                continue  # cancelled meanwhile, or gone with the engine
            if number == o.oom_at_step:
                self._fail(sequence, OutOfDeviceMemory(f"step {number} ran out of memory on order"))
            else:
                self._advance(sequence)

    def _advance(self, sequence: _Sequence) -> None:
        o, index = self._options, sequence.made
        if index == o.hang_after:
            sequence.hung = True
        elif index == o.nan_after:
            self._fail(sequence, BadLogits(f"logits of token {index} are not finite, on order"))
        elif index == o.die_after:
            self._break(EngineDied(f"the engine died at token {index} on order"))
        else:
            token = sequence.next_token(o.eos_mean)
            self._tokens += 1
            sequence.put(token)
            if token.finish is not None:
                self._remove(sequence)

    def _fail(self, sequence: _Sequence, fault: EngineFault) -> None:
        self._remove(sequence)
        sequence.put(fault)

    def _break(self, fault: EngineDied) -> None:
        self._dead = str(fault)
        for sequence in [*self._running, *self._waiting]:
            self._fail(sequence, type(fault)(str(fault)))

    async def _pass(self, ms: float) -> None:
        if ms:
            await self._clock.sleep(ms / 1000)
