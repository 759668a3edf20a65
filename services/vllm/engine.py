"""The vllm engine: real vLLM as our child, behind the Engine door.

Law: puts process, client, sleep and metrics together; knows nothing of HTTP. What it says of itself comes
from the server's own metrics and from what is open here; dead is dead: it is never started again from inside.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from pathlib import Path

from mesh.clock import Clock
from mesh.tools import cache_dir
from services.devices.checkpoint import Checkpoints, available
from services.engine import EngineFacts, EngineStats, GenerateRequest, Token
from services.faults import EngineDied, EngineFault, Refused
from services.upstream.client import ConnectionLost, Target, Upstream
from services.upstream.size import Ruler
from services.vllm.install import interpreter
from services.vllm.memory import Meter, meter
from services.vllm.process import ServerProcess, free_port
from services.vllm.rest import LEVELS, Rest
from services.vllm.settings import NAME, Plan, VllmOptions, plan
from services.vllm.sleep import Sleeper, SleepRules, in_thread
from services.vllm.suspend import LEVELS as SUSPENDED
from services.vllm.suspend import Suspender, chosen, family
from services.vllm.watch import Watch

log = logging.getLogger("weir.engine")

NOTICE_S = 1.0
"""A connection breaks before the kernel tells that the process behind it is gone."""
WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")


@dataclass(frozen=True, slots=True)
class Serving:
    """The parts of a server that was started."""

    process: ServerProcess
    client: Upstream
    rest: Rest
    watch: Watch

    @property
    def dead(self) -> str:
        return self.process.dead or self.watch.hung or self.rest.broken


class VllmEngine:
    """An Engine. Cancelling is closing the iterator: vLLM aborts the sequence when the connection closes."""

    def __init__(
        self,
        options: VllmOptions,
        model: str,
        folder: Path,
        clock: Clock,
        measure: Callable[[bool, str], Meter] = meter,
        checkpoints: Callable[[], tuple[Checkpoints | None, str]] = available,
    ) -> None:
        self._options, self._model, self._folder, self._clock = options, model, folder, clock
        self._measure, self._checkpoints = measure, checkpoints
        self._facts = EngineFacts(NAME, model, sleep_levels=(), estimates=True)
        self._started = self._closed = False
        self._open = 0
        self._it: Serving | None = None

    async def start(self) -> None:
        """Installs vLLM if it isn't there, starts it, waits until it answers. Raises WeirError; then, and
        when cancelled, nothing is left behind."""
        if self._started:
            raise RuntimeError("the engine runs already")
        self._started = True
        o = self._options
        found = await interpreter(o.python, log.info)
        port = free_port()
        what = plan(
            o,
            found.python,
            (self._model, self._folder),
            port,
            gpu=found.gpu,
            cpus=len(os.sched_getaffinity(0)),
        )
        self._it = it = self._serving(what, port, gpu=found.gpu)
        try:
            await it.process.start(it.client, o.start_s, log.info)
            await it.rest.learn()
            await it.watch.look()
            self._facts = await self._learnt(it, what, "cuda:0" if found.gpu else "cpu")
            it.watch.begin()
        except BaseException:
            await self.close()
            raise

    def _serving(self, what: Plan, port: int, *, gpu: bool) -> Serving:
        o = self._options
        base = f"http://127.0.0.1:{port}"
        target = Target(NAME, base, model=self._model, token_ids=True, token_s=o.token_s)
        client = Upstream(target, self._clock)
        file = Path(o.log) if o.log else cache_dir() / "vllm" / f"server-{port}.log"
        process = ServerProcess(what.argv, what.env, file, self._clock)
        level = in_thread(self._measure(gpu, o.device), lambda: process.pid)
        if (door := chosen(o.sleep, self._checkpoints)) is not None:
            down = Suspender(door, lambda: family(process.pid), level, o.min_freed)
            rest = Rest(client, down, down.measure)
        else:
            rules = SleepRules(o.min_freed, o.wake_s, o.settle_s)
            rest = Rest(client, Sleeper(client, level, rules, self._clock), level)
        return Serving(process, client, rest, Watch(client, o.metrics_s, self._clock))

    async def _learnt(self, it: Serving, what: Plan, device: str) -> EngineFacts:
        models = json.loads(await it.client.ask("GET", "/v1/models"))["data"]
        levels = SUSPENDED if self._options.sleep == "checkpoint" else LEVELS if what.sleep else ()
        [context] = [int(m.get("max_model_len") or 0) for m in models if m["id"] == self._model]
        return EngineFacts(
            NAME,
            self._model,
            context=context,
            sequences=what.sequences,
            kv_tokens=it.watch.figures.kv_tokens,
            kv_block=it.watch.figures.kv_block or 1,
            sleep_levels=levels,
            weights_bytes=sum(p.stat().st_size for kind in WEIGHTS for p in self._folder.glob(kind)),
            device=device,
            estimates=True,
        )

    def facts(self) -> EngineFacts:
        return self._facts

    def size(self, request: GenerateRequest) -> int:
        """Ids are counted, a text is guessed: services/upstream/size.py."""
        return (self._it.client.ruler if self._it else Ruler()).size(request)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Token, None]:
        """Tokens of one sequence. Raises EngineDied when the server is gone, what
        services/upstream/verdict.py says, RuntimeError while asleep or not started."""
        it = self._awake()
        self._open += 1
        try:
            async with contextlib.aclosing(it.client.generate(request)) as tokens:
                async for token in tokens:
                    yield token
        except Refused:
            raise
        except EngineFault as error:
            if isinstance(error, ConnectionLost):
                await self._notice(it)
            if it.dead:
                raise EngineDied(it.dead) from error
            raise
        finally:
            self._open -= 1
            it.watch.nudge()

    async def _notice(self, it: Serving) -> None:
        end = self._clock.monotonic() + NOTICE_S
        while not it.dead and self._clock.monotonic() < end:
            await self._clock.sleep(0.02)

    async def sleep(self, level: int = 1) -> None:
        """Raises RuntimeError while anything runs, where the platform can't, and when it didn't work; then it
        is awake again and answers as before, or dead."""
        it = self._awake()
        if self._open:
            raise RuntimeError("can't sleep: sequences are running")
        if level not in self._facts.sleep_levels:
            where = self._facts.device
            raise RuntimeError(
                f"vLLM on {where} has no sleep level {level}: stop it and start it again instead"
            )
        await it.rest.sleep(level)

    async def wake(self) -> None:
        """Raises WakeFailed when there is no room, when vLLM doesn't wake, or when the fixed prompt gets
        another answer than before."""
        await self._alive().rest.wake()

    def stats(self) -> EngineStats:
        if self._it is None:
            return EngineStats()
        it, f = self._it, self._it.watch.figures
        return EngineStats(
            # A cancelled sequence runs until vLLM says that it doesn't; a new one is not in its figures yet.
            running=max(f.running, self._open - f.waiting),
            waiting=f.waiting,
            kv_used=f.kv_used,
            tokens=f.tokens,
            prompt_tokens=f.prompt_tokens,
            preemptions=f.preemptions,
            dead=it.dead,
            memory_bytes=it.rest.memory.held if it.process.pid else 0,
            # vLLM's load report is two gauges, on unstreamed answers alone, which ours never are. One of them
            # is kv_used above; this is the other, by its name there.
            named={"num_requests_waiting": float(f.waiting), **it.client.load()},
        )

    def upstream_metrics(self) -> str:
        """All that vLLM tells of itself, at most metrics_s old; empty before start and after the end."""
        return "" if self._it is None or self._it.dead else self._it.watch.text

    async def close(self) -> None:
        """SIGTERM, SIGKILL after stop_s; nothing is left of it. The log stays where the server died or its
        place was chosen."""
        self._closed = True
        it = self._it
        if it is None:
            return
        # Whatever comes in between, the process must not stay.
        try:
            await it.watch.end()
            await it.client.close()
        finally:
            died = it.process.dead
            await it.process.stop(self._options.stop_s)
        if not (died or self._options.log):
            it.process.log.unlink(missing_ok=True)

    def _awake(self) -> Serving:
        it = self._alive()
        if it.rest.level:
            raise RuntimeError("the engine sleeps")
        return it

    def _alive(self) -> Serving:
        if self._it is None or self._closed:
            raise RuntimeError("the engine is closed" if self._closed else "the engine was not started")
        if self._it.dead:
            raise EngineDied(self._it.dead)
        return self._it
